"""Where this rank stands in the parallel layout, and where a linear stands on this rank.

Plain records: the groups are torch.distributed process groups (or None where the dimension has
size 1), so that the statistics run without Megatron. `linears/discovery.py` builds them from
Megatron's parallel state.
"""

from dataclasses import dataclass, field
from typing import Literal

from torch.distributed import ProcessGroup

from megatron_snip.collectives import Control

LinearKind = Literal["column", "row"]


@dataclass(frozen=True)
class Axis:
    """Ranks along one dimension of the layout.

    Tensor axis (of the dense linears, or ETP of the experts): ranks that hold shards of a weight. A
    weight that is replicated on them has an axis of one shard. Its ranks still differ: only rank 0
    counts the weight. Data axis (DP x CP, or expert DP): ranks that hold the same weights and see
    different tokens.

    Attributes:
        rank: Index of this rank on the axis.
        size: Number of shards or replicas; ranks are 0 .. size - 1 unless it is 1.
        group: The process group, or None at size 1.
    """

    rank: int = 0
    size: int = 1
    group: ProcessGroup | None = None

    @property
    def shard(self) -> int:
        """Index of the shard that is here, 0 .. size - 1."""
        return self.rank % self.size


@dataclass(frozen=True)
class LinearInfo:
    """What all ranks know of a linear; a table's row order follows a list of these.

    Attributes:
        name: Layout-independent name.
        stage: Pipeline stage that holds it.
        in_features: Number of input features K of the complete linear.
        out_features: Number of output features N of the complete linear.
        flops_per_token: FLOPs of fprop, dgrad and wgrad for one token: 6 N K, times
            `calls_per_token`.
        chunk: Model chunk of the stage that holds it, 0 without interleaving.
        layer_in_chunk: Number N of its `layers.N` in the chunk.
    """

    name: str
    stage: int
    in_features: int
    out_features: int
    flops_per_token: float
    chunk: int = 0
    layer_in_chunk: int = 0

    @property
    def calls_per_token(self) -> float:
        """How often the linear multiplies each token: in several experts, or in several calls."""
        return self.flops_per_token / (6.0 * self.in_features * self.out_features)

    @property
    def is_of_experts(self) -> bool:
        """Whether it is of a layer's experts; not of its shared ones, which all tokens pass."""
        return ".experts." in self.name


@dataclass(frozen=True)
class Placement:
    """One linear of this rank: its global name and shape, and which shard of it is here.

    Attributes:
        name: Layout-independent name (`types.linear_name`); experts of a layer share it.
        stage: Pipeline stage that holds it.
        kind: `column` shards out_features, `row` shards in_features.
        in_features: Number of input features K of the complete linear.
        out_features: Number of output features N of the complete linear.
        tp: The tensor axis over which it is sharded; an axis of one shard where it is replicated.
        num_chunks: 2 for a gated fc1, whose shard is [gate_r; up_r] of [gate; up]; else 1.
        expert: Global index of the expert, or None for a dense linear.
        num_active: Number of experts that see each token (1 for a dense linear). FLOPs count
            that often.
        num_calls: Number of forwards in each microbatch. It is 1, except for a layer of multi-token
            prediction that is repeated at every depth. FLOPs count that often.
        chunk: Model chunk of the stage that holds it, 0 without interleaving.
        layer_in_chunk: Number N of its `layers.N` in the chunk.
    """

    name: str
    stage: int
    kind: LinearKind
    in_features: int
    out_features: int
    tp: Axis = Axis()
    num_chunks: int = 1
    expert: int | None = None
    num_active: float = 1.0
    num_calls: int = 1
    chunk: int = 0
    layer_in_chunk: int = 0

    @property
    def info(self) -> LinearInfo:
        """What is the same on all ranks."""
        passes = self.num_active * self.num_calls
        flops = 6.0 * self.in_features * self.out_features * passes
        return LinearInfo(
            name=self.name,
            stage=self.stage,
            in_features=self.in_features,
            out_features=self.out_features,
            flops_per_token=flops,
            chunk=self.chunk,
            layer_in_chunk=self.layer_in_chunk,
        )

    @property
    def shard_shape(self) -> tuple[int, int]:
        """(out_features, in_features) of the weight that this rank multiplies."""
        if self.kind == "column":
            return self.out_features // self.tp.size, self.in_features
        return self.out_features, self.in_features // self.tp.size

    @property
    def instance(self) -> str:
        """The name, made distinct per expert."""
        return self.name if self.expert is None else f"{self.name}#{self.expert}"


@dataclass(frozen=True)
class Topology:
    """The parallel layout as one rank sees it.

    Attributes:
        rank: Global rank; rank 0 solves and writes.
        world_size: Number of ranks.
        stage: Pipeline-parallel rank.
        tp: Tensor-parallel axis of the dense linears.
        expert_tp: Tensor-parallel axis of the experts' linears.
        data: Ranks with the same dense weights and other tokens (DP x CP).
        expert_data: Ranks with the same experts' weights and other tokens.
        context: Number of ranks among which the tokens of each sequence are divided. These ranks
            are also in `data`.
        num_stages: Pipeline-parallel size.
        control: The control plane of all ranks, for votes, plans and small tables.
    """

    rank: int = 0
    world_size: int = 1
    stage: int = 0
    tp: Axis = Axis()
    expert_tp: Axis = Axis()
    data: Axis = Axis()
    expert_data: Axis = Axis()
    context: int = 1
    num_stages: int = 1
    control: Control = field(default_factory=Control, compare=False)

    def data_axis(self, placement: Placement) -> Axis:
        """Ranks that hold the same weight as `placement` and see other tokens."""
        return self.data if placement.expert is None else self.expert_data

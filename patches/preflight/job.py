"""What a job has built in a world without other ranks."""

import math
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

from megatron_snip.config import SnipConfig
from megatron_snip.linears.discovery import current_topology
from megatron_snip.patches.preflight.stages import Stage, groups_of
from megatron_snip.patches.preflight.world import World, building

BRIDGE_LOOP = "Megatron-Bridge"
MADE_UP_VOCABULARY = 131072
"""Size of a vocabulary whose tokenizer is not on this machine."""


@dataclass
class BuiltJob:
    """A job up to its model, which is not run.

    Attributes:
        gpus: number of ranks that was asked about; None: the fewest that the layout needs.
        args: Megatron's settings as the job has them, by the names of Megatron-LM's parser.
        stages: what a rank of each pipeline stage has built.
        notes: what is assumed, because this machine cannot know it.
        given: SNIP's settings on the command line, by name; or those of the script's SnipCallback.
        loop: package of the training loop, for messages.
        lacks_te: whether the job has Transformer Engine's layers, and this machine has not.
        on_progress: called with the share of the stages that are built, from 0 to 1.
    """

    gpus: int | None
    given: Mapping[str, Any] | SnipConfig
    args: Namespace = field(default_factory=Namespace)
    stages: list[Stage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    world: World | None = None
    loop: str = "Megatron-LM"
    lacks_te: bool = False
    on_progress: Callable[[float], None] | None = None

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the job."""
        assert self.world is not None
        return self.world.size

    def build(self, make_chunks: Callable[[], Iterable[torch.nn.Module]]) -> None:
        """Build the chunks of each pipeline stage.

        Args:
            make_chunks: builds those of the rank that this process is, in the job's own way.
        """
        assert self.world is not None
        ranks = self.world.pipeline_ranks()
        for rank, group in zip(ranks, groups_of(len(ranks)), strict=True):
            if rank != ranks[0]:
                self.world.enter(rank)
            with building():
                chunks = list(make_chunks())
            _mark_stored(chunks)
            _give_buckets(chunks, self.args)
            self.stages.append(Stage(chunks, current_topology(group.control), group))
            if self.on_progress is not None:
                self.on_progress(len(self.stages) / len(ranks))


class Reached(BaseException):
    """The script has built its model: it is not to go on. No handler of a script's catches it."""


def least_ranks(args: Any) -> int:
    """Return the fewest ranks that a layout needs.

    Args:
        args: Megatron's settings, before or after they are validated.
    """

    def size(name: str, default: int = 1) -> int:
        return int(getattr(args, name, None) or default)

    tensor = size("tensor_model_parallel_size")
    pipeline = size("pipeline_model_parallel_size")
    dense = tensor * pipeline * size("context_parallel_size")
    experts = size("expert_tensor_parallel_size", tensor) * size("expert_model_parallel_size")
    return math.lcm(dense, experts * pipeline)


def _mark_stored(chunks: Sequence[torch.nn.Module]) -> None:
    """Mark weights that the job stores quantized.

    On the meta device Transformer Engine quantizes a parameter when it is materialized, which it
    never is here. `reset_parameters` of its modules decides as this does (2.20).
    """
    for chunk in chunks:
        for module in chunk.modules():
            if not getattr(module, "primary_weights_in_fp8", False):
                continue
            of_module: Any = module
            for name, parameter in module.named_parameters(recurse=False):
                index = of_module.param_init_meta[name].fp8_meta_index
                if index is not None:
                    quantizer = of_module.quantizers["scaling_fwd"][index]
                    parameter._quantizer = quantizer  # type: ignore[attr-defined]


def _give_buckets(chunks: Sequence[torch.nn.Module], args: Any) -> None:
    """Give chunks the buckets in which DDP would gather their weights: it is not built here.

    SNIP asks a bucket which weights it holds, and whether it gathers them in BF16.
    """
    if getattr(args, "use_megatron_fsdp", False) or getattr(args, "use_torch_fsdp2", False):
        return
    # A layer-wise optimizer gathers without a buffer.
    is_layer_wise = getattr(args, "use_layer_wise_distributed_optimizer", False) or str(
        getattr(args, "optimizer", "")
    ).startswith("dist_")
    has_buffer = getattr(args, "use_distributed_optimizer", False) and not is_layer_wise
    for chunk in chunks:
        of_chunk: Any = chunk
        group: Any = object.__new__(_ParamAndGradBucketGroup)
        group.ddp_config = args
        group.buckets = [
            SimpleNamespace(params=set(chunk.parameters()), param_data=has_buffer or None)
        ]
        of_chunk.bucket_groups = [group]

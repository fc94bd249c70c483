"""From Megatron's parallel state and model to our records: topology, placements, global order.

A transformer layer is a module on a `....layers.<i>` path that carries Megatron's global, 1-based
`layer_number`; every ColumnParallelLinear and RowParallelLinear below it is planned, Megatron's own
or Transformer Engine's, and Transformer Engine's unsharded ones. Experts of a layer share one name;
a grouped linear holds several. The output layer and embeddings are outside of the layers and stay
BF16.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from megatron_snip.collectives import gather_json
from megatron_snip.errors import UnsupportedError
from megatron_snip.linears.te_modules import is_grouped, te_kind, weights_of
from megatron_snip.linears.te_replicas import is_replica, is_understood
from megatron_snip.log import warn_once, warn_once_per_job
from megatron_snip.topology import DataAxis, LinearInfo, LinearKind, Placement, TensorAxis, Topology
from megatron_snip.types import linear_name, split_linear_name

logger = logging.getLogger(__name__)

_LAYER = re.compile(r"^(?:.*\.)?(?P<block>[A-Za-z_]\w*)\.layers\.\d+$")
_EXPERT = re.compile(r"\.local_experts\.(?P<expert>\d+)\.")
_USUAL = (
    *("linear_qkv", "linear_q_proj", "linear_q_down_proj", "linear_kv_down_proj"),
    *("linear_qkv_down_proj", "linear_q_up_proj", "linear_kv_up_proj", "linear_proj"),
    *("linear_fc1", "linear_fc2"),
)
_DATA_FLOW = {name: order for order, name in enumerate(_USUAL)}
"""Order of the usual linears within a layer; modules register in another order."""
_NOT_PLANNED = frozenset({"eh_proj"})  # joins embedding and hidden state in MTP; not a layer GEMM


def current_topology() -> Topology:
    """All ranks: read Megatron's initialized parallel state; makes one gloo group.

    Raises:
        UnsupportedError: if Megatron's model parallel groups are not initialized.
    """
    if not (dist.is_initialized() and parallel_state.model_parallel_is_initialized()):
        raise UnsupportedError(
            "Megatron's parallel state is not initialized; attach SNIP after "
            "initialize_model_parallel"
        )
    data = parallel_state.get_data_parallel_group(with_context_parallel=True)
    expert_data = parallel_state.get_expert_data_parallel_group(check_initialized=False)
    expert_tensor = parallel_state.get_expert_tensor_parallel_group(check_initialized=False)
    tensor = parallel_state.get_tensor_model_parallel_group()
    context = parallel_state.get_context_parallel_world_size()
    experts = parallel_state.get_expert_model_parallel_world_size()
    world = dist.get_world_size()
    control = dist.new_group(backend="gloo") if world > 1 else None
    places = gather_json([data.rank(), tensor.rank()], control)
    return Topology(
        rank=dist.get_rank(),
        world_size=world,
        stage=parallel_state.get_pipeline_model_parallel_rank(),
        num_stages=parallel_state.get_pipeline_model_parallel_world_size(),
        tensor=_axis(TensorAxis, tensor),
        expert_tensor=_axis(TensorAxis, expert_tensor),
        data=_axis(DataAxis, data),
        expert_data=_axis(DataAxis, expert_data),
        entangled=int(context) * int(experts),
        places=tuple((data_rank, tensor_rank) for data_rank, tensor_rank in places),
        control=control,
    )


def _axis(kind: type[Any], group: dist.ProcessGroup | None) -> Any:
    if group is None or group.size() == 1:
        return kind()
    return kind(rank=group.rank(), size=group.size(), group=group)


def find_linears(
    model: Sequence[torch.nn.Module], topology: Topology
) -> list[tuple[torch.nn.Module, Placement]]:
    """Return this rank's planned linears in model order; a grouped one once an expert.

    Warns of linears that stay BF16 because it is not known which tokens they multiply.

    Args:
        model: Megatron's model chunks (several under interleaved pipelines), wrapped or not.
        topology: this rank's place.
    """
    found: list[tuple[torch.nn.Module, Placement]] = []
    unknown: list[str] = []
    for chunk in model:
        for path, layer in _layers(chunk):
            match = _LAYER.match(path)
            assert match is not None
            number = int(layer.layer_number)  # type: ignore[arg-type]
            for name, module in layer.named_modules():
                if is_replica(module) and not is_understood(name):
                    unknown.append(linear_name(number, name, match["block"]))
                elif _is_planned(module, name):
                    for place in _placements(module, name, number, match["block"], topology):
                        found.append((module, place))
    if unknown:
        warn_once(
            logger,
            f"{len(unknown)} linears stay BF16: every tensor-parallel rank holds them whole, and "
            f"which tokens each multiplies is not known: {', '.join(unknown)}",
        )
    return found


def expert_layers(model: Sequence[torch.nn.Module]) -> Iterator[tuple[str, Any]]:
    """Yield (layout-independent name of the experts, Megatron's MoE layer) of this rank.

    The experts' linears have names that begin so, e.g. `decoder.layers.3.mlp.experts`.
    """
    for chunk in model:
        for path, layer in _layers(chunk):
            match = _LAYER.match(path)
            assert match is not None
            number = int(layer.layer_number)  # type: ignore[arg-type]
            for name, module in layer.named_modules():
                if hasattr(module, "token_dispatcher") and hasattr(module, "router"):
                    yield linear_name(number, f"{name}.experts", match["block"]), module


def _is_planned(module: torch.nn.Module, name: str) -> bool:
    return _kind(module) is not None and name.rsplit(".", 1)[-1] not in _NOT_PLANNED


def _kind(module: torch.nn.Module) -> LinearKind | None:
    """How a linear is sharded; None for what is no linear."""
    if isinstance(module, ColumnParallelLinear):
        return "column"
    return "row" if isinstance(module, RowParallelLinear) else te_kind(module)


def _layers(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the outermost transformer layers of a chunk with their paths."""
    inside: str | None = None
    for path, module in chunk.named_modules():
        if inside is not None and path.startswith(inside):
            continue
        if _LAYER.match(path) and isinstance(getattr(module, "layer_number", None), int):
            inside = path + "."
            yield path, module


def _placements(
    module: Any, name: str, layer_number: int, block: str, topology: Topology
) -> list[Placement]:
    """Return where a module's weights stand: one, or one for each expert that it holds."""
    config = module.config
    kind = _kind(module)
    assert kind is not None
    experts: list[int | None] = [None]
    expert_match = _EXPERT.search(f".{name}.")
    if expert_match is not None:
        experts = [_first_local_expert(config) + int(expert_match["expert"])]
        name = _EXPERT.sub(".", f".{name}.").strip(".")
    elif is_grouped(module):
        first = _first_local_expert(config)
        experts = list(range(first, first + len(weights_of(module))))
    is_expert = experts[0] is not None
    tensor = topology.expert_tensor if is_expert else topology.tensor
    if is_replica(module):
        tensor = TensorAxis(rank=tensor.rank)  # one shard, as many ranks that hold it
    shape = tuple(weights_of(module)[0].shape)
    gated = bool(config.gated_linear_unit) and name.endswith("linear_fc1")
    chunk = (shape[0] // 2, *shape[1:]) if gated else shape  # gate and up are split one by one
    _check_shard(chunk, name, tensor)
    return [
        Placement(
            name=linear_name(layer_number, name, block),
            stage=topology.stage,
            kind=kind,
            in_features=shape[1] * (tensor.size if kind == "row" else 1),
            out_features=shape[0] * (tensor.size if kind == "column" else 1),
            tensor=tensor,
            num_chunks=2 if gated else 1,
            expert=expert,
            num_active=float(config.moe_router_topk) if is_expert else 1.0,
        )
        for expert in experts
    ]


def _first_local_expert(config: Any) -> int:
    """The global index of this rank's first expert."""
    return int(parallel_state.get_expert_model_parallel_rank()) * _num_local_experts(config)


def _num_local_experts(config: Any) -> int:
    size = int(parallel_state.get_expert_model_parallel_world_size())
    return int(config.num_moe_experts) // size


def _check_shard(shape: tuple[int, ...], name: str, tensor: TensorAxis) -> None:
    """Warn where tiles of 128 straddle shards: then results depend slightly on the layout."""
    if any(size % 128 for size in shape) and tensor.size > 1:
        warn_once_per_job(
            logger,
            f"shard {shape} of {name.split('.')[-1]} is not a multiple of 128: the last tiles are "
            "short and differ from those of other tensor-parallel sizes",
        )


def global_linears(placements: Sequence[Placement], topology: Topology) -> tuple[LinearInfo, ...]:
    """All ranks: return every linear of the model, in the same order on all ranks.

    Linears are ordered by block, layer and the data's flow within the layer.

    Raises:
        UnsupportedError: if two stages claim the same linear.
    """
    own = []
    for order, p in enumerate(placements):
        info = p.info
        own.append([order, vars(info)])
    merged: dict[str, tuple[int, LinearInfo]] = {}
    for ranks_linears in gather_json(own, topology.control):
        for order, fields in ranks_linears:
            info = LinearInfo(**fields)
            known = merged.setdefault(info.name, (order, info))[1]
            if known != info:
                raise UnsupportedError(
                    f"ranks disagree about {info.name}: {known} and {info}; linears are named by "
                    "global layer_number, which must be unique"
                )
    return tuple(info for _, info in sorted(merged.values(), key=_model_order))


def _model_order(entry: tuple[int, LinearInfo]) -> tuple[str, int, int, int]:
    order, info = entry
    block, layer_index, module = split_linear_name(info.name)
    return block, layer_index, _DATA_FLOW.get(module.rsplit(".", 1)[-1], len(_DATA_FLOW)), order

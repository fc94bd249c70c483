"""From Megatron's parallel state and model to our records: topology, placements, global order.

A layer (a transformer's or Mamba's) is a module on a `....layers.<i>` path that has Megatron's
global, 1-based `layer_number`. Every ColumnParallelLinear and RowParallelLinear below it is
planned, Megatron's own or Transformer Engine's, and Transformer Engine's unsharded ones. Experts of
a layer share one name; a grouped linear holds several. The output layer and embeddings are outside
of the layers and stay BF16.

Where a language model is a part of the model, its layers alone are planned. A vision or audio
encoder beside it, and a teacher within it, have layers with the same names, other tokens and often
frozen weights; they keep the job's own precision.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from megatron_snip.collectives import Control
from megatron_snip.errors import UnsupportedError, UsageError
from megatron_snip.linears.te.modules import (
    TOKENS_KNOWN,
    is_grouped,
    is_replicated,
    te_kind,
    weights_of,
)
from megatron_snip.log import warn_once, warn_once_per_job
from megatron_snip.planning.stage_layers import StageLayers, outer_layer
from megatron_snip.topology import Axis, LinearInfo, LinearKind, Placement, Topology
from megatron_snip.types import linear_name, split_linear_name

logger = logging.getLogger(__name__)

_LAYER = re.compile(r"^(?:.*\.)?(?P<block>[A-Za-z_]\w*)\.layers\.\d+$")
_EXPERT = re.compile(r"\.local_experts\.(?P<expert>\d+)\.")
_USUAL = (
    # Mamba
    "in_proj",
    "out_proj",
    # attention, and latent attention between its input and linear_proj
    "linear_qkv",
    "linear_q_proj",
    "linear_q_down_proj",
    "linear_kv_down_proj",
    "linear_qkv_down_proj",
    "linear_q_up_proj",
    "linear_kv_up_proj",
    "linear_proj",
    # MLP
    "linear_fc1",
    "linear_fc2",
)
_DATA_FLOW = {name: order for order, name in enumerate(_USUAL)}
"""Order of the usual linears within a layer; modules register in another order."""


def current_topology(control: Control | None = None) -> Topology:
    """All ranks: read Megatron's initialized parallel state.

    Args:
        control: the control plane; by default one of all ranks is made.

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
    return Topology(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        stage=parallel_state.get_pipeline_model_parallel_rank(),
        tp=_axis(tensor),
        expert_tp=_axis(expert_tensor),
        data=_axis(data),
        expert_data=_axis(expert_data),
        context=int(parallel_state.get_context_parallel_world_size()),
        num_stages=int(parallel_state.get_pipeline_model_parallel_world_size()),
        control=Control.of_all_ranks() if control is None else control,
    )


def _axis(group: dist.ProcessGroup | None) -> Axis:
    if group is None or group.size() == 1:
        return Axis()
    return Axis(rank=group.rank(), size=group.size(), group=group)


def find_linears(
    model: Sequence[torch.nn.Module], topology: Topology
) -> list[tuple[torch.nn.Module, list[Placement]]]:
    """Return this rank's planned linears in model order, with a placement per weight.

    A grouped linear has one weight per expert, any other one. Warns of linears that stay BF16
    because it is not known which tokens they multiply, and of layers beside the language model.

    Args:
        model: Megatron's model chunks (several under interleaved pipelines), wrapped or not.
        topology: this rank's place.

    Raises:
        UnsupportedError: if two linears have one name.
    """
    found: list[tuple[torch.nn.Module, list[Placement]]] = []
    unknown: list[str] = []
    _warn_of_other_layers(model)
    for layer, name, module in _layer_modules(model):
        kind = _kind(module)
        own_name = name.rpartition(".")[2]
        if is_replicated(module) and own_name not in TOKENS_KNOWN:
            unknown.append(linear_name(layer.number, name, layer.block))
        # eh_proj joins embedding and hidden state in MTP; it is not a layer GEMM
        elif kind is not None and own_name != "eh_proj":
            found.append((module, _placements(module, kind, topology, layer, name)))
    if unknown:
        warn_once(
            logger,
            f"{len(unknown)} linears stay BF16, because they are replicated over tensor-parallel "
            f"ranks and it is not known which tokens each multiplies: {', '.join(unknown)}",
        )
    times = Counter(place.instance for _, places in found for place in places)
    for instance, count in times.items():
        if count > 1:
            raise UnsupportedError(
                f"{count} linears of this rank are named {instance}; SNIP plans the layers of one "
                "language model, and a layer_number must be unique in it"
            )
    return found


def expert_layers(model: Sequence[torch.nn.Module]) -> Iterator[tuple[str, Any]]:
    """Yield (layout-independent name of the experts, Megatron's MoE layer) of this rank.

    The experts' linears have names that begin so, e.g. `decoder.layers.3.mlp.experts`.
    """
    for layer, name, module in _layer_modules(model):
        if hasattr(module, "token_dispatcher") and hasattr(module, "router"):
            yield linear_name(layer.number, f"{name}.experts", layer.block), module


class _Layer(NamedTuple):
    """A layer that is in no other layer.

    Attributes:
        path: its path in the model chunk.
        block: the module that holds the layers.
        number: Megatron's global number, 1-based.
        chunk: index of the model chunk in its pipeline stage.
        module: the layer.
    """

    path: str
    block: str
    number: int
    chunk: int
    module: torch.nn.Module


def _layer_modules(
    model: Sequence[torch.nn.Module],
) -> Iterator[tuple[_Layer, str, torch.nn.Module]]:
    """Yield (layer, name in the layer, module) of the language model's layers."""
    for index, chunk in enumerate(model):
        is_planned = _planned_paths(chunk)
        for layer in _outermost_layers(chunk, index):
            if is_planned(layer.path):
                for name, module in layer.module.named_modules():
                    yield layer, name, module


def _outermost_layers(chunk: torch.nn.Module, index: int = 0) -> Iterator[_Layer]:
    """Yield the layers of a model chunk that are in no other layer; `index` is the chunk's."""
    inside: str | None = None
    # `named_modules` yields a layer before what is in it, and nothing else in between.
    for path, module in chunk.named_modules():
        match = _LAYER.match(path)
        number = getattr(module, "layer_number", None)
        within = inside is not None and path.startswith(inside)
        if match is None or within or not isinstance(number, int):
            continue
        inside = path + "."
        yield _Layer(path, match["block"], number, index, module)


def _planned_paths(chunk: torch.nn.Module) -> Callable[[str], bool]:
    """Return a function: whether the layer at a path of the chunk is one of the language model's.

    The language model is the outermost one: a teacher of distillation is another one within it. In
    a chunk without a language model, such as a diffusion model's, all layers are planned.
    """
    modules = chunk.named_modules()
    models = [path for path, module in modules if isinstance(module, LanguageModule)]

    def is_planned(path: str) -> bool:
        if not models:
            return True
        # The chunk itself has the empty path.
        around = [model for model in models if model == "" or path.startswith(f"{model}.")]
        return len(around) == 1  # two: a layer of the teacher; none: of an encoder

    return is_planned


def _warn_of_other_layers(model: Sequence[torch.nn.Module]) -> None:
    """Warn of layers with linears beside the language model."""
    left: dict[str, int] = {}
    for chunk in model:
        is_planned = _planned_paths(chunk)
        for layer in _outermost_layers(chunk):
            has_linears = any(_kind(module) for module in layer.module.modules())
            if has_linears and not is_planned(layer.path):
                parent, _, _ = layer.path.rpartition(".")  # `vision.layers` of `vision.layers.3`
                left[parent] = left.get(parent, 0) + 1
    if left:
        named = ", ".join(f"{parent} ({count} layers)" for parent, count in left.items())
        warn_once_per_job(
            logger, f"layers beside the language model keep the run's precision: {named}"
        )


def _kind(module: torch.nn.Module) -> LinearKind | None:
    """Return how a linear is sharded; None for what is no linear."""
    if isinstance(module, ColumnParallelLinear):
        return "column"
    if isinstance(module, RowParallelLinear):
        return "row"
    return te_kind(module)


def _placements(
    module: Any, kind: LinearKind, topology: Topology, layer: _Layer, name: str
) -> list[Placement]:
    """Return where the weights of a linear are.

    Args:
        module: the linear.
        kind: how it is sharded.
        topology: this rank's place.
        layer: its layer.
        name: the linear's name within its layer.
    """
    config = module.config
    weights = weights_of(module)
    # The global index of the expert of each weight; None for a linear that is not an expert's.
    experts: list[int | None] = [None]
    expert_match = _EXPERT.search(f".{name}.")  # the pattern has a dot at both ends
    if expert_match is not None:  # a module of its own; its name is that of all experts
        experts = [first_local_expert(config) + int(expert_match["expert"])]
        name = _EXPERT.sub(".", f".{name}.").strip(".")
    elif is_grouped(module):
        first = first_local_expert(config)
        experts = list(range(first, first + len(weights)))
    is_expert = experts[0] is not None
    tp = topology.expert_tp if is_expert else topology.tp
    if is_replicated(module):
        tp = Axis(rank=tp.rank)  # one shard, which several ranks hold
    is_repeated = layer.block == "mtp" and getattr(config, "mtp_use_repeated_layer", False)
    rows, cols = weights[0].shape
    gated = bool(config.gated_linear_unit) and name.endswith("linear_fc1")
    _warn_of_short_tiles((rows // 2 if gated else rows, cols), name, tp)
    return [
        Placement(
            name=linear_name(layer.number, name, layer.block),
            stage=topology.stage,
            kind=kind,
            in_features=cols * (tp.size if kind == "row" else 1),
            out_features=rows * (tp.size if kind == "column" else 1),
            tp=tp,
            num_chunks=2 if gated else 1,  # gate and up are sharded separately
            expert=expert,
            num_active=float(config.moe_router_topk) if is_expert else 1.0,
            num_calls=int(config.mtp_num_layers) if is_repeated else 1,
            chunk=layer.chunk,
            layer_in_chunk=int(layer.path.rpartition(".")[2]),
        )
        for expert in experts
    ]


def first_local_expert(config: Any) -> int:
    """Return the global index of this rank's first expert."""
    size = int(parallel_state.get_expert_model_parallel_world_size())
    rank = int(parallel_state.get_expert_model_parallel_rank())
    return rank * (int(config.num_moe_experts) // size)


def _warn_of_short_tiles(shape: tuple[int, int], name: str, tp: Axis) -> None:
    """Warn where tiles of 128 straddle shards: results then depend slightly on the layout."""
    if any(size % 128 for size in shape) and tp.size > 1:
        warn_once_per_job(
            logger,
            f"shard {shape} of {name.split('.')[-1]} is not a multiple of 128: the last tiles are "
            "short and differ from those of other tensor-parallel sizes",
        )


def own_linears(placements: Sequence[Placement]) -> list[list[Any]]:
    """Return what all ranks must know of this rank's linears: [order here, fields of the info].

    Experts of a layer share a record.
    """
    # Reversed, so that the first of the experts that share an info has the last word on its order.
    order_of = {place.info: order for order, place in reversed(list(enumerate(placements)))}
    return [[order, vars(info)] for info, order in order_of.items()]


def global_linears(of_ranks: Iterable[list[list[Any]]]) -> tuple[LinearInfo, ...]:
    """Return every linear of the model, in the same order on all ranks.

    Linears are ordered by block, layer and the data's flow within the layer.

    Args:
        of_ranks: what `own_linears` returned on all ranks.

    Raises:
        UnsupportedError: if two stages claim the same linear.
    """
    merged: dict[str, tuple[int, LinearInfo]] = {}
    for records in of_ranks:
        for order, fields in records:
            info = LinearInfo(**fields)
            known = merged.setdefault(info.name, (order, info))[1]
            if known != info:
                raise UnsupportedError(
                    f"ranks disagree about {info.name}: {known} and {info}; linears are named by "
                    "global layer_number, which must be unique"
                )

    def model_order(entry: tuple[int, LinearInfo]) -> tuple[str, int, int, int]:
        order, info = entry
        block, layer_index, module = split_linear_name(info.name)
        flow = _DATA_FLOW.get(module.rsplit(".", 1)[-1], len(_DATA_FLOW))
        return block, layer_index, flow, order

    return tuple(info for _, info in sorted(merged.values(), key=model_order))


def stage_layers(
    linears: Sequence[LinearInfo], num_stages: int, num_chunks: int
) -> StageLayers | None:
    """Return which layers each pipeline stage holds; None if two of its layers have one number.

    Args:
        linears: every linear of the model, as `global_linears` returns them.
        num_stages: number of pipeline stages.
        num_chunks: number of model chunks of each stage.
    """
    # By stage, then by model chunk: {layer: its number in the chunk}.
    found: list[list[dict[str, int]]] = [[{} for _ in range(num_chunks)] for _ in range(num_stages)]
    for linear in linears:
        layer, _, _ = outer_layer(linear.name)
        found[linear.stage][linear.chunk][layer] = linear.layer_in_chunk
    try:
        return StageLayers(tuple(map(tuple, found)))
    except UsageError:
        return None  # two language models side by side have blocks of one name

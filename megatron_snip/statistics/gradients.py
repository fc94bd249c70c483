"""Norms of the linears' gradients, added up by the ranks that own their elements.

Between the backward and the optimizer's step each element of a gradient is reduced on the rank that
owns it. Which elements that are depends on the optimizer, known by its attributes:

    DistributedOptimizer              a flat range of each weight, over the data axis
    LayerWiseDistributedOptimizer     a chain, with other weights on each data rank
    any of them under FSDP            DTensors: rows or ranges over the data axis (sharded.py)
    other optimizers                  every data rank has all elements

With `--num-distributed-optimizer-instances` several data ranks own an element. So the elements are
counted, and `health.py` divides by how often they were.
"""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_snip.statistics.sharded import model_weight, own_elements
from megatron_snip.topology import Placement, Topology

NUM_NORMS = 2
"""Numbers of one linear: |gradient|^2, and how many elements are in it."""


class OwnedElements(NamedTuple):
    """Elements [start, end) of one flattened weight.

    Attributes:
        parameter: The tensor that holds the weight between iterations, and its gradient.
        start: First element of the flattened weight.
        end: One past the last element.
    """

    parameter: Tensor
    start: int
    end: int


@torch.no_grad()
def gradient_norms(
    weights: Mapping[Placement, torch.nn.Parameter],
    optimizer: Any,
    topology: Topology,
    loss_scale: float,
) -> dict[str, Tensor]:
    """Return this rank's part of each linear's norms, FP64 [NUM_NORMS]; parts add over ranks.

    Args:
        weights: this rank's weights; their gradients are reduced over data ranks.
        optimizer: Megatron's.
        topology: this rank's place.
        loss_scale: the factor of the gradients; the norms are without it.
    """
    owned = owned_elements(optimizer)
    sharded = is_sharded(optimizer)
    found: dict[str, Tensor] = {}
    for placement, weight in weights.items():
        own = owned.get(weight)
        counts = own is not None if sharded else topology.data_axis(placement).rank == 0
        # A replicated weight counts on the first rank of the tensor axis.
        is_copy = placement.tp.size == 1 and placement.tp.rank != 0
        grad = gradient_of(weight if own is None else own.parameter)
        if grad is None or is_copy or not counts:
            continue
        if isinstance(grad, DTensor):
            grad = grad.to_local()
        elif own is not None:
            grad = grad.reshape(-1)[own.start : own.end]
        norms = torch.zeros(NUM_NORMS, dtype=torch.float64, device=weight.device)
        norm = torch.linalg.vector_norm(grad, dtype=torch.float32)
        norms[0] = norm.double().square() / loss_scale**2
        norms[1].fill_(grad.numel())  # an assignment would wait for the device
        found[placement.name] = norms + found.get(placement.name, 0.0)
    return found


def gradient_of(parameter: Tensor) -> Tensor | None:
    """Return the gradient between backward and optimizer step; under FSDP a DTensor.

    It is Megatron's `main_grad` where DDP made one, `decoupled_grad` where Megatron-FSDP did, else
    autograd's.
    """
    for name in ("main_grad", "decoupled_grad"):
        found: Tensor | None = getattr(parameter, name, None)
        if found is not None:
            return found
    return parameter.grad


def owned_elements(optimizer: Any) -> dict[Tensor, OwnedElements]:
    """Return what this rank owns of every model parameter that `optimizer` updates.

    Args:
        optimizer: a Megatron optimizer (possibly chained) or a torch optimizer.

    Returns:
        By model parameter; one of which this rank owns nothing is absent.
    """
    return {
        model_weight(parameter): OwnedElements(parameter, start, end)
        for part in _parts(optimizer)
        for parameter, start, end in _owned(part)
        if start < end
    }


def is_sharded(optimizer: Any) -> bool:
    """Whether state is split over the data axis (Megatron's distributed optimizers)."""
    if getattr(optimizer, "dp_cp_params_list", None) is not None:
        return True  # each data rank owns other weights
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is not None:
        return any(map(is_sharded, chained))
    if hasattr(optimizer, "_get_model_param_range_map"):
        return True
    groups = getattr(optimizer, "param_groups", ())
    return any(isinstance(p, DTensor) for group in groups for p in group["params"])


def _parts(optimizer: Any) -> Iterator[Any]:
    """Yield the optimizers that Megatron chains, perhaps none, or the only one.

    A chain may hold another one: from 0.18 on Megatron chains its LayerWiseDistributedOptimizer
    (`--optimizer muon --use-distributed-optimizer`) with the optimizer of the other parameters.
    """
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is None:
        yield optimizer
        return
    for each in chained:
        yield from _parts(each)


def _owned(part: Any) -> Iterator[tuple[Tensor, int, int]]:
    """Yield (model parameter, start, end) of one optimizer."""
    inner = getattr(part, "optimizer", part)  # torch's, inside of Megatron's
    if inner is None:  # of a rank without trainable parameters
        return
    if hasattr(part, "model_param_group_index_map"):
        for param in part.model_param_group_index_map:
            owned = part._get_model_param_range_map(param)["param"]
            yield param, owned.start, owned.end
        return
    if hasattr(part, "float16_groups"):
        params = chain(*part.float16_groups, *part.fp32_from_fp32_groups)
    else:
        params = chain(*(group["params"] for group in inner.param_groups))
    for param in params:
        yield param, *own_elements(param)

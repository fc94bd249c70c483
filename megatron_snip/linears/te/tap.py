"""What an observer sees of a Transformer Engine linear, in either backend.

Transformer Engine's linears multiply more than their arguments show: a fused norm comes before the
GEMM, the weight may be stored quantized, and delayed scaling has scales of earlier iterations.
`with_tap` gives all of it to `StepObserver.observe`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_snip.linears.planned_linear import PlannedTELinear
from megatron_snip.linears.te.modules import (
    expert_sizes,
    input_is_split,
    is_grouped,
    multiplied_input,
    output_is_split,
    weights_of,
)
from megatron_snip.statistics.observer import StepObserver


def with_tap(
    linear: PlannedTELinear,
    observer: StepObserver | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
) -> Any:
    """Return what a linear's forward returned, with a tap on the output of every weight's GEMM.

    There is no tap without an observer, or in a forward without gradients (it is recomputed).

    Args:
        linear: what ran.
        observer: what makes the taps.
        args: positional arguments of the forward.
        kwargs: keyword arguments of the forward.
        result: what the forward returned.
    """
    if observer is None or not torch.is_grad_enabled():
        return result
    if result is None:
        return None  # Megatron calls hooks of fused linears without a result
    output, bias = result
    given = dict(zip(("x", "m_splits"), args, strict=False)) | kwargs
    if is_grouped(linear.module):
        return _tapped_experts(linear, observer, given["x"], given["m_splits"], output), bias
    return _tapped(linear, observer, given["x"], output), bias


def _tapped(linear: PlannedTELinear, observer: StepObserver, x: Tensor, output: Tensor) -> Tensor:
    """Return the output of a linear with one weight, with a tap on it."""
    module = linear.module
    scales = linear.delayed_scales(linear.placements[0])
    return observer.observe(
        linear.placements[0],
        x,
        _observed_weights(linear)[0],
        output,
        input_is_split=input_is_split(module),
        output_is_split=output_is_split(module),
        prepare_input=lambda rows: multiplied_input(module, rows, is_rounded=scales is None),
        delayed_scales=scales,
    )


def _tapped_experts(
    linear: PlannedTELinear, observer: StepObserver, x: Tensor, m_splits: Any, output: Tensor
) -> Tensor:
    """Return the output of grouped experts, with a tap on each; an expert may have zero rows.

    Where the forward is only counted there is one tap for all experts: to split the output and to
    join it again would copy it.
    """
    sizes = expert_sizes(m_splits)
    if observer.only_counts(linear.placements[0]):  # so it is for each expert: they run together
        return observer.counted(linear.placements, sizes, output)
    inputs = torch.split(x, sizes)
    outputs = torch.split(output, sizes)
    weights = _observed_weights(linear)
    experts = zip(linear.placements, inputs, weights, outputs, strict=True)
    tapped = [
        observer.observe(
            placement, rows, weight, y, delayed_scales=linear.delayed_scales(placement)
        )
        for placement, rows, weight, y in experts
    ]
    return torch.cat(tapped)


def _observed_weights(linear: PlannedTELinear) -> list[Tensor | Callable[[], Tensor]]:
    """Return the weights, each as `StepObserver.observe` takes it."""
    if linear.stored is None:
        return list(weights_of(linear.module))
    return [partial(linear.stored.value, index) for index in range(len(linear.placements))]

"""A linear's own GEMMs in a measuring pass: fprop and dgrad, without the wgrad that nobody reads.

The passes of a refresh discard gradients, and pass A forms the weight's itself from X and G.
Megatron runs a weight that needs no gradient through a linear of its own, the same in fprop and
dgrad; given the weight detached it saves a third of a pass's GEMMs, and no gradient hook runs.
Meanwhile the memory of the weight's gradient in DDP's buffers is free for other things; where wgrad
runs all the same, it is sent elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


def spare_memory(weight: torch.nn.Parameter) -> torch.Tensor | None:
    """Return the weight's gradient in DDP's buffers [N, K], if it can hold the weight; else None.

    Nothing is spare where the weight is of a quantized type, whose gradient's memory Megatron may
    use for gathering it.
    """
    gradient = getattr(weight, "main_grad", None)
    fits = (
        type(gradient) is torch.Tensor
        and type(weight.data) is torch.Tensor
        and gradient.dtype in (torch.float32, weight.dtype)
        and gradient.shape == weight.shape
        and gradient.device == weight.device
        and gradient.is_contiguous()
    )
    return gradient if fits else None


class Elsewhere:
    """Gradients sent to memory of their own, where DDP's buffers are in use for other things."""

    def __init__(self) -> None:
        self._own: dict[torch.nn.Parameter, torch.Tensor] = {}

    def send(self, weight: torch.nn.Parameter) -> None:
        """Give the weight another `main_grad` until the block of `watched` ends."""
        gradient = getattr(weight, "main_grad", None)
        if gradient is not None and weight not in self._own:
            self._own[weight] = gradient
            weight.main_grad = torch.zeros_like(gradient)  # type: ignore[attr-defined]

    @contextmanager
    def watched(self, weights: Iterable[torch.nn.Parameter]) -> Iterator[None]:
        """Within, gradients may be sent; afterwards all have their own memory again.

        Args:
            weights: whose gradients are sent by themselves, should any come on a way of their own
                (a penalty on weights in the loss).
        """
        with ExitStack() as hooks:
            for weight in weights:
                if weight.requires_grad:
                    untyped: Any = weight
                    handle = untyped.register_hook(lambda _, weight=weight: self.send(weight))
                    hooks.callback(handle.remove)
            try:
                yield
            finally:
                for weight, gradient in self._own.items():
                    weight.main_grad = gradient  # type: ignore[attr-defined]
                self._own.clear()


def without_wgrad(
    original: Callable[..., torch.Tensor], kwargs: dict[str, Any], elsewhere: Elsewhere
) -> torch.Tensor:
    """Return `original(**kwargs)`; in its backward the weight and the bias get no gradient.

    Where the output would then need no gradient at all (its input comes from frozen layers), or
    the call asks for what Megatron's linear for frozen weights refuses, they do, elsewhere.

    Args:
        original: `_forward_impl` of ColumnParallelLinear or RowParallelLinear.
        kwargs: what Megatron calls it with.
        elsewhere: takes the gradient of a weight that gets one.
    """
    refused = (
        kwargs.get("grad_output_buffer") is not None
        or kwargs.get("wgrad_deferral_limit") is not None
        or int(kwargs.get("gtp_remat_size") or 1) > 1
    )
    if not torch.is_grad_enabled():
        return original(**kwargs)
    if kwargs["input"].requires_grad and not refused:
        names = [name for name in ("weight", "bias") if kwargs.get(name) is not None]
        kwargs = {**kwargs, **{name: kwargs[name].detach() for name in names}}
    elif kwargs["weight"].requires_grad:
        elsewhere.send(kwargs["weight"])
    return original(**kwargs)

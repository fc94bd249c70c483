"""A tap on a linear's output: it hands the gradient of the output to an observer in the backward.

The tap is an identity in both directions. It sits on what the linear's own GEMM returns, before any
reduction over tensor-parallel ranks, whose backward gives every rank the full gradient. Activation
recompute runs the forward twice, once without gradients, and the backward once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_snip.topology import Placement


@dataclass(frozen=True)
class TokenPart:
    """The rows of a linear's input that came from one data rank.

    Attributes:
        data_rank: of their sender.
        rows: [R] int64 on the CPU, in the order of the sender's sequence.
    """

    data_rank: int
    rows: Tensor


class Observer(Protocol):
    """Watches linears during a training iteration; called by the linears on every rank."""

    def observe(
        self,
        placement: Placement,
        input: Tensor,
        weight: Tensor,
        output: Tensor,
        *,
        input_is_split: bool = False,
        output_is_split: bool = False,
        prepare_input: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Return `output`, possibly with a tap on it.

        Args:
            placement: which linear this is.
            input: [tokens or [s, b], K] as given to the linear.
            weight: [N, K], this rank's shard.
            output: what the linear's GEMM gave.
            input_is_split: the rows are this rank's share of the tokens, which the linear gathers
                over its tensor axis (sequence parallelism).
            output_is_split: likewise of the output's rows.
            prepare_input: gives what the GEMM multiplies from rows of `input` (a fused norm).
        """
        ...


class _Tap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, on_backward: Callable[[Tensor], None]) -> Tensor:
        ctx.on_backward = on_backward
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.on_backward(grads[0])
        return grads[0], None


def tap(output: Tensor, on_backward: Callable[[Tensor], None]) -> Tensor:
    """Return `output`; its backward calls `on_backward(grad_output)` once."""
    tapped: Tensor = _Tap.apply(output, on_backward)  # type: ignore[no-untyped-call]
    return tapped

"""The autograd function of a quantized linear, with all that Megatron's own one does.

Kept: the all-gather of the input over the tensor-parallel group under sequence parallelism (in
forward and, overlapped with dgrad, in backward), the reduce-scatter or all-reduce of the input
gradient overlapped with wgrad, accumulation into `main_grad` with `grad_added_to_main_grad`,
bias, and frozen weights. X is saved as it came in (not gathered, not quantized); quantization is
repeated in the backward along that GEMM's own dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.parallel_state import get_global_memory_buffer

from megatron_snip.linears import gemms
from megatron_snip.options import Option
from megatron_snip.quantizers import StochasticStream


@dataclass(frozen=True)
class LinearCall:
    """How one call of a linear is to run.

    Attributes:
        option: formats of the three GEMMs.
        stream: returns the backward's random numbers; called once a backward.
        sequence_parallel: X is this rank's tokens; gather it, and scatter dX.
        allreduce_dgrad: sum dX over `tp_group`.
        fuse_wgrad: add dW into `weight.main_grad` instead of returning it.
        tp_group: process group of the tensor axis, where one of the above needs it.
    """

    option: Option
    stream: Callable[[], StochasticStream]
    sequence_parallel: bool
    allreduce_dgrad: bool
    fuse_wgrad: bool
    tp_group: dist.ProcessGroup | None


class QuantizedLinear(torch.autograd.Function):
    """Y = X W^T + b with quantized GEMMs; see the module's text."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        call: LinearCall,
    ) -> torch.Tensor:
        """Return Y.

        Args:
            ctx: autograd's context.
            input: [s, b, K] or [M, K]; s is this rank's share under sequence parallelism.
            weight: [N, K], this rank's shard.
            bias: [N] or None.
            call: how to run.
        """
        ctx.save_for_backward(input, weight)
        ctx.call = call
        ctx.use_bias = bias is not None
        ctx.main_grad = getattr(weight, "main_grad", None) if call.fuse_wgrad else None
        x = _gather_start(input, call)[0] if call.sequence_parallel else input
        y = gemms.fprop(x.reshape(-1, x.shape[-1]), weight, call.option)
        y = y.view(*x.shape[:-1], weight.shape[0])
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return (dX, dW, db, None)."""
        call: LinearCall = ctx.call
        input, weight = ctx.saved_tensors
        g = grads[0].reshape(-1, grads[0].shape[-1])
        stream = call.stream()
        need_wgrad = ctx.needs_input_grad[1]

        x, gathering = input, None
        if need_wgrad and call.sequence_parallel:
            x, gathering = _gather_start(input, call, async_op=True)  # overlaps with dgrad
        dx = gemms.dgrad(g, weight, call.option, stream).view(*grads[0].shape[:-1], -1)
        if gathering is not None:
            gathering.wait()
        dx, reducing = _reduce_start(dx, input, call)  # overlaps with wgrad

        dw = None
        if need_wgrad:
            x = x.reshape(-1, x.shape[-1])
            dw = gemms.wgrad(g, x, call.option, stream, fp32_output=call.fuse_wgrad)
            dw = _accumulate(weight, ctx.main_grad, dw) if call.fuse_wgrad else dw.to(weight.dtype)
        db = g.sum(dim=0) if ctx.use_bias else None
        if reducing is not None:
            reducing.wait()
        return dx, dw, db, None


def _gather_start(
    input: torch.Tensor, call: LinearCall, async_op: bool = False
) -> tuple[torch.Tensor, Any]:
    """Gather X over the tensor axis into Megatron's shared buffer; return it and a handle."""
    assert call.tp_group is not None
    shape = [input.shape[0] * call.tp_group.size(), *input.shape[1:]]
    buffer = get_global_memory_buffer().get_tensor(shape, input.dtype, "mpu")
    handle = dist.all_gather_into_tensor(
        buffer, input.contiguous(), group=call.tp_group, async_op=async_op
    )
    return buffer, handle


def _reduce_start(
    dx: torch.Tensor, input: torch.Tensor, call: LinearCall
) -> tuple[torch.Tensor, Any]:
    """Start the sum of dX over the tensor axis, if one is due; return the result and a handle."""
    if call.sequence_parallel:
        assert not call.allreduce_dgrad
        scattered = torch.empty_like(input)
        handle = dist.reduce_scatter_tensor(
            scattered, dx.contiguous(), group=call.tp_group, async_op=True
        )
        return scattered, handle
    if call.allreduce_dgrad:
        dx = dx.contiguous()
        return dx, dist.all_reduce(dx, group=call.tp_group, async_op=True)
    return dx, None


def _accumulate(
    weight: torch.Tensor, main_grad: torch.Tensor | None, dw: torch.Tensor
) -> torch.Tensor | None:
    """Add dW into main_grad; return what autograd must see in its place.

    DDP's hook skips a gradient that is flagged as added; autograd still needs a tensor there so
    that the hook runs in the main backward thread.
    """
    assert main_grad is not None, "gradient accumulation fusion without main_grad"
    weight.main_grad = main_grad  # type: ignore[attr-defined]
    main_grad.add_(dw)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    make = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
    return make(main_grad.shape, dtype=weight.dtype, device=weight.device)

"""The autograd function of a quantized linear, with all that Megatron's own one does.

Kept: the all-gather of the input over the tensor-parallel group under sequence parallelism (in
forward and, overlapped with dgrad, in backward), the reduce-scatter or all-reduce of the input
gradient overlapped with wgrad, accumulation into `main_grad` with `grad_added_to_main_grad`,
bias, and frozen weights.

What waits for the backward, and in which form, depends on who runs wgrad:

    bf16, simulate   X as it came in (not gathered, not quantized), 2 bytes an element in BF16
    native           X as wgrad will multiply it: 1 byte an element and a scale for 128

Under sequence parallelism a native X is quantized before it is gathered, so that bytes travel; its
tiles run along tokens, so this takes a number of local tokens that 128 divides. With another one,
X itself is saved and gathered, and quantized after that.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.parallel_state import get_global_memory_buffer

from megatron_snip.linears import gemms, native
from megatron_snip.linears.native_gemm import GemmOperand
from megatron_snip.options import Option
from megatron_snip.quantizers import StochasticStream
from megatron_snip.types import Gemm

Keep = Callable[[Hashable, Callable[[], Any]], Any]
"""(what form of the weight, how to make it) -> the form, made now or kept (`kept_weights`)."""


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
        native: GEMMs that run on FP8 tensor cores; the others are simulated (or bf16).
        keep: keeps quantized forms of the weight.
        grad_enabled: whether a backward may follow.
    """

    option: Option
    stream: Callable[[], StochasticStream]
    sequence_parallel: bool
    allreduce_dgrad: bool
    fuse_wgrad: bool
    tp_group: dist.ProcessGroup | None
    native: frozenset[Gemm] = frozenset()
    keep: Keep = gemms.unkept
    grad_enabled: bool = True


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
        flat = input.reshape(-1, input.shape[-1])
        # bytes can be made of this rank's tokens alone
        early = not call.sequence_parallel or native.tiles_fit_shards(flat.shape[0])
        backward_due = ctx.needs_input_grad[1] and call.grad_enabled
        row, waiting = native.input_operands(
            flat,
            call.option,
            fprop=early and Gemm.FPROP in call.native,
            wgrad=early and backward_due and Gemm.WGRAD in call.native,
        )
        _save(ctx, input, weight, waiting)
        ctx.call = call
        ctx.use_bias = bias is not None
        ctx.main_grad = getattr(weight, "main_grad", None) if call.fuse_wgrad else None
        y = _fprop(input, flat, row, weight, call)
        ranks = call.tp_group.size() if call.sequence_parallel and call.tp_group else 1
        y = y.view(input.shape[0] * ranks, *input.shape[1:-1], weight.shape[0])
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return (dX, dW, db, None)."""
        call: LinearCall = ctx.call
        input, weight, waiting = _saved(ctx)
        g = grads[0].reshape(-1, grads[0].shape[-1])
        stream = call.stream()
        need_wgrad = ctx.needs_input_grad[1]

        x, gathering = input, None
        if need_wgrad and call.sequence_parallel:  # overlaps with dgrad
            if waiting is None:
                x, gathering = _gather_start(input, call, async_op=True)
            else:
                assert call.tp_group is not None
                gathering = native.GatheringTokens(waiting, call.tp_group)
        g_row, g_tokens = native.grad_operands(
            g,
            call.option,
            stream,
            Gemm.DGRAD in call.native,
            need_wgrad and Gemm.WGRAD in call.native,
        )
        dx = _dgrad(g, g_row, weight, call, stream).view(*grads[0].shape[:-1], weight.shape[1])
        if gathering is not None:
            gathered = gathering.wait()
            waiting = waiting if waiting is None else gathered
        dx, reducing = _reduce_start(dx, ctx.input_shape, call)  # overlaps with wgrad

        dw = None
        if need_wgrad:
            dw = _wgrad(g, g_tokens, x, waiting, call, stream)
            dw = _accumulate(weight, ctx.main_grad, dw) if call.fuse_wgrad else dw.to(weight.dtype)
        db = g.sum(dim=0) if ctx.use_bias else None
        if reducing is not None:
            reducing.wait()
        return dx, dw, db, None


def _save(ctx: Any, input: torch.Tensor, weight: torch.Tensor, waiting: GemmOperand | None) -> None:
    """Save what the backward needs of X: its bytes, or itself, or its shape alone."""
    ctx.input_shape = input.shape
    ctx.waiting = None
    if waiting is not None:
        ctx.waiting = (waiting.rows, waiting.depth)
        ctx.save_for_backward(weight, waiting.codes, waiting.scales)
    elif ctx.needs_input_grad[1]:
        ctx.save_for_backward(weight, input)
    else:
        ctx.save_for_backward(weight)


def _saved(ctx: Any) -> tuple[Any, torch.Tensor, GemmOperand | None]:
    """Return (X or None, W, X as wgrad takes it or None)."""
    weight, *of_x = ctx.saved_tensors
    if ctx.waiting is not None:
        rows, depth = ctx.waiting
        return None, weight, GemmOperand(of_x[0], of_x[1], rows, depth, square=False)
    return (of_x[0] if of_x else None), weight, None


def _fprop(
    input: torch.Tensor,
    flat: torch.Tensor,
    row: GemmOperand | None,
    weight: torch.Tensor,
    call: LinearCall,
) -> torch.Tensor:
    """Return Y [M, N]."""
    if row is None:
        x = flat
        if call.sequence_parallel:
            x = _gather_start(input, call)[0].reshape(-1, input.shape[-1])
        if Gemm.FPROP not in call.native:
            return gemms.fprop(x, weight, call.option, call.keep)
        row = native.input_operands(x, call.option, fprop=True, wgrad=False)[0]
        assert row is not None
    elif call.sequence_parallel:
        assert call.tp_group is not None
        row = native.gather_rows(row, call.tp_group)
    w = native.weight_operand(weight, call.option, Gemm.FPROP, call.keep)
    return native.fprop(row, w, input.dtype)


def _dgrad(
    g: torch.Tensor,
    row: GemmOperand | None,
    weight: torch.Tensor,
    call: LinearCall,
    stream: StochasticStream,
) -> torch.Tensor:
    """Return dX [M, K]."""
    if row is None:
        return gemms.dgrad(g, weight, call.option, stream, call.keep)
    w = native.weight_operand(weight, call.option, Gemm.DGRAD, call.keep)
    return native.dgrad(row, w, g.dtype)


def _wgrad(
    g: torch.Tensor,
    tokens: GemmOperand | None,
    x: Any,
    waiting: GemmOperand | None,
    call: LinearCall,
    stream: StochasticStream,
) -> torch.Tensor:
    """Return dW [N, K], in FP32 where it is quantized or added to main_grad."""
    if tokens is None:
        flat = x.reshape(-1, x.shape[-1])
        return gemms.wgrad(g, flat, call.option, stream, fp32_output=call.fuse_wgrad)
    if waiting is None:
        flat = x.reshape(-1, x.shape[-1])
        waiting = native.input_operands(flat, call.option, fprop=False, wgrad=True)[1]
        assert waiting is not None
    return native.wgrad(tokens, waiting)


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
    dx: torch.Tensor, input_shape: torch.Size, call: LinearCall
) -> tuple[torch.Tensor, Any]:
    """Start the sum of dX over the tensor axis, if one is due; return the result and a handle."""
    if call.sequence_parallel:
        assert not call.allreduce_dgrad
        scattered = dx.new_empty(input_shape)
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

"""A linear with simulated GEMMs, forward and backward.

    fprop   Y  = Q(X) Q(W)^T      dgrad   dX = Q(G) Q(W)      wgrad   dW = Q(G)^T Q(X)

Each GEMM quantizes its operands along its own contraction dimension. Operands are dequantized to
FP32 and multiplied with FP32 accumulation, then the result is rounded to the output's dtype once,
as a block-scaled tensor-core GEMM does up to the order of its accumulation. On a GPU the
dequantized operands of large GEMMs are BF16 (`matmul_fp32`). A bf16 GEMM is a plain product in
its operands' dtype; only a wgrad that is added into an FP32 `main_grad` has an FP32 result.

The autograd function has those features of Megatron's own autograd function that pretraining uses:
the all-gather of the input over the tensor-parallel group under sequence parallelism (in the
forward, and overlapped with dgrad in the backward), the reduce-scatter or all-reduce of the input
gradient overlapped with wgrad, accumulation into `main_grad` with `grad_added_to_main_grad`, bias,
and frozen weights. The forward saves this rank's X for the backward, or X quantized for wgrad.

Shapes: M tokens, K in_features, N out_features.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.parallel_state import get_global_memory_buffer
from torch import Tensor

from megatron_snip.formats import get_format
from megatron_snip.matmul import LARGE_GEMM, matmul_fp32
from megatron_snip.options import Option
from megatron_snip.quantizers.quantize import (
    operand_block,
    quantize_dequantize_operand,
    quantize_dequantize_pair,
)
from megatron_snip.quantizers.stochastic import StochasticStream
from megatron_snip.types import Gemm, Operand

WgradFunction = Callable[[Tensor, Tensor], Tensor | None]
"""(Q(G) [M, N], Q(X) [M, K]) -> dW, or None where it was added into `main_grad`."""

WeightCache = dict[Hashable, Tensor]
"""The quantized forms of one weight, by format, block and dtype."""


@dataclass(frozen=True)
class LinearCall:
    """How one call of a linear runs.

    Attributes:
        option: formats of the three GEMMs.
        stream: returns the backward's random numbers; called once per backward.
        sequence_parallel: X holds this rank's tokens: all-gather it, and reduce-scatter dX.
        allreduce_dgrad: sum dX over `tp_group`.
        fuse_wgrad: add dW into `weight.main_grad` instead of returning it.
        tp_group: process group of the tensor axis; `sequence_parallel` and `allreduce_dgrad` need
            it.
        cache: holds the quantized weight; None quantizes it in every GEMM.
        saves_input: save X itself for the backward, not its quantized form. Needed where Megatron
            frees or offloads the inputs of linears, and restores them for the backward.
        output_dtype: dtype of Y of a quantized fprop; None is X's.
        defer_wgrad: gets wgrad's operands, Q(G) and Q(X) of all gathered tokens, and a function of
            both that returns dW. It calls the function after the backward. None computes dW in the
            backward.
    """

    option: Option
    stream: Callable[[], StochasticStream]
    sequence_parallel: bool = False
    allreduce_dgrad: bool = False
    fuse_wgrad: bool = False
    tp_group: dist.ProcessGroup | None = None
    cache: WeightCache | None = None
    saves_input: bool = False
    output_dtype: torch.dtype | None = None
    defer_wgrad: Callable[[Tensor, Tensor, WgradFunction], None] | None = None


def quantized_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall
) -> Tensor:
    """Return Y = X W^T + b.

    Args:
        input: X [s, b, K] or [M, K]; s is this rank's share under sequence parallelism.
        weight: W [N, K], this rank's shard.
        bias: b [N] or None.
        call: how to run. With `fuse_wgrad` the weight must have a `main_grad`.

    Returns:
        This shard's Y, [s, b, N] or [M, N], not reduced over shards. With
        `call.sequence_parallel` X is gathered first: then s is that of all shards.
    """
    # Under recompute the first forward runs without gradients and saves nothing.
    needs_wgrad = torch.is_grad_enabled() and weight.requires_grad
    output: Tensor = _QuantizedLinear.apply(input, weight, bias, call, needs_wgrad)  # type: ignore[no-untyped-call]
    return output


class _QuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        call: LinearCall,
        needs_wgrad: bool,
    ) -> Tensor:
        """Return Y; see `quantized_linear`."""
        ctx.input_shape = input.shape
        ctx.call = call
        ctx.use_bias = bias is not None
        ctx.main_grad = getattr(weight, "main_grad", None) if call.fuse_wgrad else None
        prepared = _prepare_input(input, weight, call, needs_wgrad)
        ctx.saves_quantized = prepared.saves_quantized
        ctx.save_for_backward(weight, prepared.saved)
        x = prepared.multiplied
        rows = x.reshape(-1, x.shape[-1])
        y = fprop_or_dgrad_gemm(
            rows,
            weight,
            Gemm.FPROP,
            call.option,
            dtype=call.output_dtype or input.dtype,
            cache=call.cache,
        )
        y = y.view(*x.shape[:-1], weight.shape[0])
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return (dX, dW, db, None, None)."""
        call: LinearCall = ctx.call
        option = call.option
        weight, saved = ctx.saved_tensors  # X; None if the weight is frozen
        g = grads[0].reshape(-1, grads[0].shape[-1])
        x = saved
        gathering = None
        if x is not None and call.sequence_parallel:  # overlaps with dgrad
            x, gathering = _start_gather(saved, call, async_op=True)
        dtype = operand_dtype(g, weight.shape[1])
        stream = call.stream()
        of_grad = Operand.GRAD_OUTPUT
        if x is None:
            g_row = quantize_dequantize_operand(
                g, option.dgrad, of_grad, Gemm.DGRAD, stream=stream, dtype=dtype
            )
        else:  # for dgrad with tiles in rows, and for wgrad with tiles in columns
            g_row, g_col = quantize_dequantize_pair(
                g, (option.dgrad, option.wgrad), of_grad, stream=stream, dtype=dtype
            )
        dx = fprop_or_dgrad_gemm(g_row, weight, Gemm.DGRAD, option, dtype=g.dtype, cache=call.cache)
        del g_row
        dx = dx.view(*grads[0].shape[:-1], weight.shape[1])
        if gathering is not None:
            gathering.wait()
        dx, reducing = _start_reduce(dx, ctx.input_shape, call)  # overlaps with wgrad

        dw = None
        if x is not None:
            if not ctx.saves_quantized:
                x = quantize_dequantize_operand(
                    x, option.wgrad, Operand.INPUT, Gemm.WGRAD, dtype=dtype
                )
            wgrad = partial(_wgrad, call=call, weight=weight, main_grad=ctx.main_grad)
            if call.defer_wgrad is None:
                dw = wgrad(g_col, x.flatten(0, -2))
            else:
                if call.sequence_parallel:  # it is in a buffer that the next linear overwrites
                    x = x.clone()
                call.defer_wgrad(g_col, x.flatten(0, -2), wgrad)
            if call.fuse_wgrad:
                # Also if wgrad is deferred: `defer_wgrad` adds it to main_grad later, so DDP's hook
                # must not add what autograd gets here.
                dw = _flag_as_added(weight)
        db = g.sum(dim=0) if ctx.use_bias else None
        if reducing is not None:
            reducing.wait()
        return dx, dw, db, None, None


class _Input(NamedTuple):
    """X in a forward.

    Attributes:
        multiplied: X as fprop multiplies it, gathered.
        saved: what the backward needs of X, not gathered; None if it needs nothing.
        saves_quantized: whether `saved` is quantized for wgrad.
    """

    multiplied: Tensor
    saved: Tensor | None
    saves_quantized: bool


def _prepare_input(input: Tensor, weight: Tensor, call: LinearCall, needs_wgrad: bool) -> _Input:
    option = call.option
    num_shards = 1
    if call.sequence_parallel:
        assert call.tp_group is not None
        num_shards = call.tp_group.size()
    # The GEMM multiplies the gathered X, which has num_shards times the tokens.
    dtype = operand_dtype(input, weight.shape[0] * num_shards)
    # Megatron's own linear saves X: this one must not take more memory.
    may_save_quantized = dtype.itemsize <= input.dtype.itemsize and not call.saves_input
    num_rows = input.shape[:-1].numel()
    gather_changes_tiles = num_shards > 1 and not can_quantize_before_gather(option, num_rows)
    if gather_changes_tiles or not may_save_quantized:
        x, _ = _start_gather(input, call) if call.sequence_parallel else (input, None)
        x = quantize_dequantize_operand(x, option.fprop, Operand.INPUT, Gemm.FPROP, dtype=dtype)
        return _Input(x, input if needs_wgrad else None, saves_quantized=False)
    # Before the gather, each rank quantizes its own tokens only, once for both GEMMs.
    for_wgrad = None
    if needs_wgrad:
        x, for_wgrad = quantize_dequantize_pair(
            input, (option.fprop, option.wgrad), Operand.INPUT, dtype=dtype
        )
    else:
        x = quantize_dequantize_operand(input, option.fprop, Operand.INPUT, Gemm.FPROP, dtype=dtype)
    if call.sequence_parallel:
        x, _ = _start_gather(x, call)
    return _Input(x, for_wgrad, saves_quantized=True)


def _start_gather(input: Tensor, call: LinearCall, async_op: bool = False) -> tuple[Tensor, Any]:
    """Gather X over the tensor axis into Megatron's shared buffer; return that and a handle."""
    assert call.tp_group is not None
    shape = [input.shape[0] * call.tp_group.size(), *input.shape[1:]]
    buffer = get_global_memory_buffer().get_tensor(shape, input.dtype, "mpu")
    handle = dist.all_gather_into_tensor(
        buffer, input.contiguous(), group=call.tp_group, async_op=async_op
    )
    return buffer, handle


def _start_reduce(dx: Tensor, input_shape: torch.Size, call: LinearCall) -> tuple[Tensor, Any]:
    """Start the sum of dX over the tensor axis, if it needs one; return dX and a handle or None."""
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


def _wgrad(
    g: Tensor, x: Tensor, call: LinearCall, weight: Tensor, main_grad: Tensor | None
) -> Tensor | None:
    """Return dW; with fused accumulation add it into main_grad and return None."""
    if not call.fuse_wgrad:
        return wgrad_gemm(g, x, call.option, weight.dtype)
    assert main_grad is not None, "gradient accumulation fusion without main_grad"
    # With hooks of saved tensors (activation offload) this can be another object than the weight of
    # the forward, without the attribute.
    weight.main_grad = main_grad  # type: ignore[attr-defined]
    main_grad.add_(wgrad_gemm(g, x, call.option, torch.float32))
    return None


def _flag_as_added(weight: Tensor) -> Tensor | None:
    """Flag dW as added to main_grad; return what autograd must get instead."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True  # DDP's hook skips a gradient that is flagged
    # Autograd still needs a tensor, so that the hook runs in the main backward thread. Megatron's
    # own autograd function does the same.
    make = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
    return make(weight.shape, dtype=weight.dtype, device=weight.device)


def can_quantize_before_gather(option: Option, num_rows: int) -> bool:
    """Return whether quantizing X before the all-gather gives bitwise the same as after it.

    Args:
        option: decides the formats of X.
        num_rows: tokens of a shard.
    """
    for name, gemm in ((option.fprop, Gemm.FPROP), (option.wgrad, Gemm.WGRAD)):
        fmt = get_format(name)
        tile_rows, _ = operand_block(fmt, Operand.INPUT, gemm)
        # One scale for the tensor is that of all shards; a tile must not cross two of them.
        if fmt.quantized and (fmt.needs_amax_or_scale or num_rows % tile_rows):
            return False
    return True


def fprop_or_dgrad_gemm(
    a: Tensor,
    w: Tensor,
    gemm: Gemm,
    option: Option,
    dtype: torch.dtype,
    cache: WeightCache | None = None,
) -> Tensor:
    """Return Y = X W^T [M, N] for fprop, dX = G W [M, K] for dgrad.

    Args:
        a: X [M, K] or G [M, N], quantized for this GEMM.
        w: W [N, K].
        gemm: fprop or dgrad.
        option: decides the format of both operands.
        dtype: dtype of a quantized GEMM's result; a bf16 GEMM has that of its operands.
        cache: holds the quantized W; fprop and dgrad share it where format and block are equal.
    """
    name = option[gemm]
    is_fprop = gemm is Gemm.FPROP
    if name == "bf16":
        return torch.matmul(a, w.t() if is_fprop else w)
    used = operand_dtype(a, w.shape[0 if is_fprop else 1])
    block = operand_block(get_format(name), Operand.WEIGHT, gemm)
    # The version: a training loop may change W (an optimizer step) before the cache is cleared.
    key = (name, block, used, w.data_ptr(), w._version)
    cache = {} if cache is None else cache
    if key not in cache:
        cache[key] = quantize_dequantize_operand(w, name, Operand.WEIGHT, gemm, dtype=used)
    return matmul_fp32(a, cache[key].t() if is_fprop else cache[key], dtype)


def wgrad_gemm(g: Tensor, x: Tensor, option: Option, dtype: torch.dtype) -> Tensor:
    """Return dW [N, K] in `dtype`.

    Args:
        g: [M, N], quantized for wgrad.
        x: [M, K], quantized for wgrad.
        option: decides the format of both operands.
        dtype: dtype of the result; FP32 for GEMMs that add into `main_grad`.
    """
    if option.wgrad == "bf16" and dtype == g.dtype:
        return g.t().matmul(x)
    return matmul_fp32(g.t(), x, dtype)


def operand_dtype(tensor: Tensor, other: int) -> torch.dtype:
    """Return what quantized operands are written in: FP32, or BF16 where `matmul_fp32` takes it.

    Args:
        tensor: one operand, whose dims are two of the GEMM's three.
        other: size of the third dim.
    """
    large = tensor.is_cuda and tensor.numel() * other > LARGE_GEMM
    return torch.bfloat16 if large else torch.float32

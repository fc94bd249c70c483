"""GEMMs of quantized or plain operands, in FP32, rounded once to the output's dtype.

Names are column-major, as cuBLAS has them: D = op(B) op(A) on rows, where A is the weight of fprop.

    fprop   A = W,  B = X   transA            Y  = X W^T
    dgrad   A = W,  B = G                     dX = G W
    wgrad   A = X,  B = G            transB   dW = G^T X

An operand whose contraction runs along its rows is taken as quantized along rows, else as quantized
along columns.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.te_on_cpu.extension.enums import torch_dtype
from tests.te_on_cpu.extension.numbers import check
from tests.te_on_cpu.extension.operands import values_of
from tests.te_on_cpu.extension.quantize import quantize


def product(A: Any, trans_a: bool, B: Any, trans_b: bool) -> Tensor:
    """Return op(B) op(A) in FP32."""
    a = values_of(A, columnwise=not trans_a)
    b = values_of(B, columnwise=trans_b)
    contraction_a = a.shape[1] if trans_a else a.shape[0]
    contraction_b = b.shape[0] if trans_b else b.shape[1]
    check(
        contraction_a == contraction_b,
        f"Invalid matrix dimensions for GEMM (A={tuple(a.shape)}, transa={trans_a}, "
        f"B={tuple(b.shape)}, transb={trans_b})",
    )
    return (b.t() if trans_b else b) @ (a.t() if trans_a else a)


@torch.no_grad()
def generic_gemm(
    A: Any,
    transA: bool,
    B: Any,
    transB: bool,
    D: Any,
    quantizer: Any,
    output_dtype: int | None,
    bias: Tensor | None,
    bias_type: int,
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    workspace: Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Any = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> Any:
    """gemm.cpp:144. Returns the output, the bias's gradient, the input of GELU, extra_output.

    Raises:
        NotImplementedError: for communication that is overlapped with the GEMM.
    """
    if comm_overlap is not None:
        raise NotImplementedError("generic_gemm with comm_overlap does not run on the CPU")
    out = alpha * product(A, transA, B, transB)
    dtype = torch_dtype(output_dtype) if output_dtype is not None else A.dtype
    if not transB:
        out = out.reshape(*tuple(B.size())[:-1], out.shape[-1])
    bias_grad = None
    if bias is not None and grad:
        bias_grad = values_of(B, transB).sum(0).to(dtype)
    elif bias is not None:
        out = out + bias.float()
    pre_gelu = None
    if gelu and grad:
        assert gelu_in is not None
        out = _gelu_backward(gelu_in, out)
    elif gelu:
        pre_gelu = out.to(dtype)
        out = functional.gelu(out, approximate="tanh")
    if quantizer is not None:
        result = quantize(out.to(dtype), quantizer, D)
    elif D is None:
        result = out.to(dtype)
    else:
        _check_output(D, out, dtype, output_dtype)
        kept = D.float() * (1.0 if beta is None else beta) if accumulate else 0.0
        result = D.copy_(out + kept)
    return result, bias_grad, pre_gelu, extra_output


def _check_output(D: Tensor, out: Tensor, dtype: torch.dtype, output_dtype: int | None) -> None:
    """gemm.cpp:203 to 211."""
    check(
        tuple(D.shape) == tuple(out.shape),
        f"GEMM output has invalid dims (expected {tuple(out.shape)}, got {tuple(D.shape)})",
    )
    check(
        output_dtype is None or D.dtype == dtype,
        f"GEMM output has invalid dtype (expected {dtype}, found {D.dtype})",
    )


def _gelu_backward(gelu_in: Tensor, grad: Tensor) -> Tensor:
    x = gelu_in.detach().float().requires_grad_()
    with torch.enable_grad():
        (found,) = torch.autograd.grad(
            functional.gelu(x, approximate="tanh"), x, grad.reshape(x.shape)
        )
    return found


@torch.no_grad()
def te_general_grouped_gemm(
    A: Sequence[Any],
    transa: bool,
    B: Sequence[Any],
    transb: bool,
    D: Sequence[Tensor],
    D_type: int,
    m_splits: Sequence[int],
    bias: Sequence[Tensor],
    bias_type: int,
    single_output: bool,
    pre_gelu_out: Sequence[Tensor],
    grad: bool,
    workspace: Any,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> Sequence[Tensor]:
    """gemm.cpp:470: one GEMM per expert, into D[i] or into successive rows of D[0]."""
    start = 0
    for i, (a, b) in enumerate(zip(A, B, strict=True)):
        out = product(a, transa, b, transb)
        if single_output:
            target = D[0].view(-1)[start : start + out.numel()].view(out.shape)
            start += out.numel()
        else:
            target = D[i]
        if bias[i].numel() and grad:
            bias[i].copy_(values_of(b, transb).sum(0))
        elif bias[i].numel():
            out = out + bias[i].float()
        if pre_gelu_out[i].numel():
            pre_gelu_out[i].copy_(out)
            out = functional.gelu(out, approximate="tanh")
        if target.numel():
            check(
                tuple(target.shape) == tuple(out.shape),
                f"grouped GEMM output has invalid dims (expected {tuple(out.shape)}, "
                f"got {tuple(target.shape)})",
            )
            target.copy_(target.float() + out if accumulate else out)
    return bias

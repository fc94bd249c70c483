"""Gated activations of fused operations, in FP32."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu


@torch.no_grad()
def swiglu(input: Tensor, quantizer: Any, *_: Any) -> Any:
    """silu(x[:n]) * x[n:] (activation.cpp), quantized where a quantizer is given."""
    gate, linear = input.float().chunk(2, -1)
    result = (silu(gate) * linear).to(input.dtype)
    return result if quantizer is None else quantizer(result)


def dswiglu(grad: Tensor, input: Tensor, quantizer: Any, *_: Any) -> Any:
    """The gradient of `swiglu` (activation.cpp)."""
    with torch.enable_grad():
        x = input.detach().float().requires_grad_()
        gate, linear = x.chunk(2, -1)
        (found,) = torch.autograd.grad(silu(gate) * linear, x, grad.float())
    result = found.to(grad.dtype)
    return result if quantizer is None else quantizer(result)


@torch.no_grad()
def scaled_swiglu(
    input: Tensor, act_scales: Tensor, quantizer: Any, glu_interleave_size: int = 0
) -> Any:
    """swiglu(x) * scale of the row; common/activation/scaled_activation.cu, rounded once."""
    gate, linear = _gate_and_linear(input.float(), glu_interleave_size)
    rows = act_scales.float().reshape(*input.shape[:-1], 1)
    result = (silu(gate) * linear * rows).to(input.dtype)
    return result if quantizer is None else quantizer(result)


def scaled_dswiglu(
    grad: Tensor,
    input: Tensor,
    act_scales: Tensor,
    quantizer: Any,
    glu_interleave_size: int = 0,
    compute_scale_grad: bool = True,
) -> tuple[Any, Tensor | None]:
    """The gradients of `scaled_swiglu`: of its input, and if wanted of the scales."""
    with torch.enable_grad():
        x = input.detach().float().requires_grad_()
        rows = act_scales.detach().float().reshape(*input.shape[:-1], 1).requires_grad_()
        gate, linear = _gate_and_linear(x, glu_interleave_size)
        result = silu(gate) * linear * rows
        dx, dscales = torch.autograd.grad(result, (x, rows), grad.float())
    found = dx.to(grad.dtype)
    scale_grad = dscales.reshape(act_scales.shape).to(act_scales.dtype)
    return (
        found if quantizer is None else quantizer(found),
        scale_grad if compute_scale_grad else None,
    )


def _gate_and_linear(x: Tensor, interleave: int) -> tuple[Tensor, Tensor]:
    """Split the features: halves, or alternating blocks of `interleave`."""
    if not interleave:
        gate, linear = x.chunk(2, -1)
        return gate, linear
    blocks = x.unflatten(-1, (-1, 2, interleave))
    return blocks[..., 0, :].flatten(-2), blocks[..., 1, :].flatten(-2)

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

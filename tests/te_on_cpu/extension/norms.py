"""LayerNorm and RMSNorm, in FP32.

With delayed scaling the kernel quantizes the FP32 result; every other quantizer gets the result in
the output's dtype (normalization.cpp:90 to 117).
"""

from typing import Any

import torch
from torch import Tensor

from tests.te_on_cpu.extension.enums import torch_dtype
from tests.te_on_cpu.extension.quantize import quantize


def _rows(x: Tensor) -> Tensor:
    return x.detach().reshape(-1, x.shape[-1]).float()


def _finished(normal: Tensor, x: Tensor, out: Any, quantizer: Any, otype: int) -> Any:
    normal = normal.reshape(x.shape)
    dtype = torch_dtype(otype)
    if type(quantizer).__name__ == "Float8Quantizer":
        if out is None:
            out = quantizer.make_empty(x.shape, dtype=dtype)
        return quantize(normal, quantizer, out)
    normal = normal.to(dtype)
    if quantizer is not None:
        return quantize(normal, quantizer, out)
    return normal if out is None else out.copy_(normal)


@torch.no_grad()
def layernorm_fwd(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: int,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> Any:
    """normalization.cpp:61."""
    x = _rows(input)
    mean = x.mean(-1)
    rsigma = (x.var(-1, unbiased=False) + eps).rsqrt()
    normal = (x - mean[:, None]) * rsigma[:, None] * (weight.float() + float(zero_centered_gamma))
    if bias is not None:
        normal = normal + bias.float()
    return _finished(normal, input, ln_out, quantizer, otype), mean, rsigma


@torch.no_grad()
def layernorm_bwd(
    dz: Tensor,
    x: Tensor,
    mu: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> Any:
    """normalization.cpp:13."""
    grad = _rows(dz)
    normal = (_rows(x) - mu[:, None]) * rsigma[:, None]
    scaled = grad * (gamma.float() + float(zero_centered_gamma))
    dx = scaled - scaled.mean(-1, keepdim=True)
    dx = rsigma[:, None] * (dx - normal * (scaled * normal).mean(-1, keepdim=True))
    dgamma = (grad * normal).sum(0).to(gamma.dtype)
    return dx.reshape(x.shape).to(x.dtype), dgamma, grad.sum(0).to(gamma.dtype)


@torch.no_grad()
def rmsnorm_fwd(
    input: Tensor,
    weight: Tensor,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: int,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> Any:
    """normalization.cpp:305."""
    x = _rows(input)
    rsigma = (x.square().mean(-1) + eps).rsqrt()
    normal = x * rsigma[:, None] * (weight.float() + float(zero_centered_gamma))
    return _finished(normal, input, ln_out, quantizer, otype), None, rsigma


@torch.no_grad()
def rmsnorm_bwd(
    dz: Tensor,
    x: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> Any:
    """normalization.cpp:216."""
    grad = _rows(dz)
    normal = _rows(x) * rsigma[:, None]
    scaled = grad * (gamma.float() + float(zero_centered_gamma))
    dx = rsigma[:, None] * (scaled - normal * (scaled * normal).mean(-1, keepdim=True))
    return dx.reshape(x.shape).to(x.dtype), (grad * normal).sum(0).to(gamma.dtype)


@torch.no_grad()
def rmsnorm_bwd_add(
    dz: Tensor,
    x: Tensor,
    add: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> Any:
    """normalization.cpp:259."""
    dx, dgamma = rmsnorm_bwd(dz, x, rsigma, gamma, sm_margin, zero_centered_gamma)
    return dx + add, dgamma

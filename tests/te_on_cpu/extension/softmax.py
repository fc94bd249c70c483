"""Softmax of unfused attention, with its scale and mask, in FP32."""

import torch
from torch import Tensor

MASKED = -10000.0


@torch.no_grad()
def _softmax(x: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    logits = x.float() * scale
    if mask is None:
        return torch.softmax(logits, -1).to(x.dtype)
    hidden = mask.bool().expand_as(logits)
    attention = torch.softmax(logits.masked_fill(hidden, MASKED), -1)
    # The kernel returns zeros where everything is masked.
    return attention.masked_fill(hidden.all(-1, keepdim=True), 0.0).to(x.dtype)


@torch.no_grad()
def _backward(grad: Tensor, result: Tensor, scale: float) -> Tensor:
    y = result.float()
    g = grad.float()
    return (scale * y * (g - (g * y).sum(-1, keepdim=True))).to(grad.dtype)


def _later_keys(x: Tensor) -> Tensor:
    """True where a key comes after the query; the last query and the last key are aligned."""
    num_queries, num_keys = x.shape[-2:]
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool)
    return mask.triu(num_keys - num_queries + 1)


def scaled_softmax_forward(input: Tensor, scale_factor: float) -> Tensor:
    """softmax.cpp:11."""
    return _softmax(input, scale_factor)


def scaled_softmax_backward(grad: Tensor, result: Tensor, scale_factor: float) -> Tensor:
    """softmax.cpp:40."""
    return _backward(grad, result, scale_factor)


def scaled_masked_softmax_forward(input: Tensor, mask: Tensor, scale_factor: float) -> Tensor:
    """softmax.cpp:71."""
    return _softmax(input, scale_factor, mask)


def scaled_masked_softmax_backward(grad: Tensor, result: Tensor, scale_factor: float) -> Tensor:
    """softmax.cpp:108."""
    return _backward(grad, result, scale_factor)


def scaled_upper_triang_masked_softmax_forward(input: Tensor, scale_factor: float) -> Tensor:
    """softmax.cpp:139."""
    return _softmax(input, scale_factor, _later_keys(input))


def scaled_upper_triang_masked_softmax_backward(
    grad: Tensor, result: Tensor, scale_factor: float
) -> Tensor:
    """softmax.cpp:162."""
    return _backward(grad, result, scale_factor)


def scaled_aligned_causal_masked_softmax_forward(input: Tensor, scale_factor: float) -> Tensor:
    """softmax.cpp:196."""
    return _softmax(input, scale_factor, _later_keys(input))


def scaled_aligned_causal_masked_softmax_backward(
    grad: Tensor, result: Tensor, scale_factor: float
) -> Tensor:
    """softmax.cpp:225."""
    return _backward(grad, result, scale_factor)

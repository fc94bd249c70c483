"""Lists of tensors in one call: norms, scaling, and Adam, as Megatron's optimizer calls them."""

from collections.abc import Sequence

import torch
from torch import Tensor

Lists = Sequence[Sequence[Tensor]]


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """multi_tensor/l2norm.cpp:11."""
    norms = torch.stack([tensor.float().norm() for tensor in tensor_lists[0]])
    return norms.norm().reshape(1), norms if per_tensor else torch.empty(0)


@torch.no_grad()
def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    inv_scale: Tensor,
    per_tensor: bool = False,
) -> tuple[Tensor, Tensor]:
    """multi_tensor/l2norm.cpp:55."""
    total, each = multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor)
    return total * inv_scale, each * inv_scale


@torch.no_grad()
def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, scale: float
) -> None:
    """multi_tensor/scale.cpp:11: tensor_lists[1] = tensor_lists[0] * scale."""
    for source, target in zip(*tensor_lists, strict=True):
        if not torch.isfinite(source).all():
            noop_flag.fill_(1)
        target.copy_(source.float() * scale)


def multi_tensor_scale_tensor(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, scale: Tensor
) -> None:
    """multi_tensor/scale.cpp:21."""
    multi_tensor_scale(chunk_size, noop_flag, tensor_lists, float(scale))


@torch.no_grad()
def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """multi_tensor/adam.cpp:11; AdamFunctorMaster, common/multi_tensor/adam.cu:54.

    Lists: gradients, parameters, first and second moments, and FP32 master weights if there are.
    Weight decay is added to the gradient in mode 0, to the update in mode 1.
    """
    correction1 = 1.0 - beta1**step if bias_correction else 1.0
    correction2 = 1.0 - beta2**step if bias_correction else 1.0
    for gradient, parameter, first, second, *master in zip(*tensor_lists, strict=True):
        weight = (master[0] if master else parameter).float()
        grad = gradient.float()
        if mode == 0:
            grad = grad + weight_decay * weight
        first.copy_(beta1 * first.float() + (1 - beta1) * grad)
        second.copy_(beta2 * second.float() + (1 - beta2) * grad * grad)
        denominator = (second.float() / correction2).sqrt() + epsilon
        update = (first.float() / correction1) / denominator
        if mode == 1:
            update = update + weight_decay * weight
        weight = weight - lr * update
        parameter.copy_(weight)
        if master:
            master[0].copy_(weight)


@torch.no_grad()
def multi_tensor_adam_param_remainder(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, *settings: float
) -> None:
    """multi_tensor/adam.cpp; AdamFunctorMasterParamRemainder, common/multi_tensor/adam.cu.

    The lists of `multi_tensor_adam`, with BF16 parameters, and in place of FP32 master weights
    their lower 16 bits, as int16. A parameter is the master weight's upper half, rounded up if the
    lower half is negative as an int16.
    """
    gradients, parameters, first, second, remainders = tensor_lists
    masters = [_joined(*each) for each in zip(parameters, remainders, strict=True)]
    lists = [gradients, masters, first, second]
    multi_tensor_adam(chunk_size, noop_flag, lists, *settings)  # type: ignore[arg-type]
    for master, parameter, remainder in zip(masters, parameters, remainders, strict=True):
        bits = master.view(torch.int32)
        remainder.copy_(bits.to(torch.int16))
        upper = (bits >> 16) + (remainder < 0)
        parameter.view(torch.int16).copy_(upper.to(torch.int16))


def _joined(parameter: Tensor, remainder: Tensor) -> Tensor:
    """Return the FP32 master weight of a BF16 parameter and its remainder."""
    upper = parameter.view(torch.int16).to(torch.int32) - (remainder < 0).to(torch.int32)
    return ((upper << 16) | (remainder.to(torch.int32) & 0xFFFF)).view(torch.float32)

"""Amaxes, and the scales that delayed scaling makes of their history."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.te_on_cpu.extension.enums import torch_dtype
from tests.te_on_cpu.extension.numbers import amax_of, check, divided


def compute_amax(input: Tensor, amax: Tensor) -> None:
    """recipe.cpp:17."""
    amax.copy_(amax_of(input.detach()).reshape(amax.shape))


@torch.no_grad()
def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: Tensor,
    amax_histories: Sequence[Tensor],
    scales: Sequence[Tensor],
    amax_compute_algo: str,
    fp8_dtype: int,
    margin: float,
) -> None:
    """recipe.cpp:32; kernel_bulk, common/recipe/delayed_scaling.cu:173.

    Args:
        amax_reduction_buffer: this step's amaxes of all tensors over all ranks; 0 where a tensor
            was not quantized.
        amax_histories: [length, tensors] each; row 0 is this step's, of this rank. Rolled in place.
        scales: [tensors] each; replaced where the amax is positive and finite.
        amax_compute_algo: `max` of the history, or its `most_recent`.
        fp8_dtype: whose largest number the amax is scaled to.
        margin: powers of two that are left free above it.
    """
    check(
        amax_compute_algo in ("max", "most_recent"),
        f"Unsupported amax compute algorithm ({amax_compute_algo})",
    )
    scaled_max = torch.finfo(torch_dtype(fp8_dtype)).max * 2.0 ** -float(margin)
    start = 0
    for history, scale in zip(amax_histories, scales, strict=True):
        reduced = amax_reduction_buffer.reshape(-1)[start : start + scale.numel()]
        start += scale.numel()
        last = torch.where(reduced != 0, reduced, history[0])
        rolled = torch.cat([history[1:], last[None]])
        used = last if amax_compute_algo == "most_recent" else rolled.amax(0)
        # What was not quantized in this step keeps its history; `max` is then 0, as in the kernel.
        used = torch.where(last != 0, used, 0.0)
        rolled[0] = 0.0
        history.copy_(torch.where(last != 0, rolled, history))
        updated = divided(scaled_max, used).clamp(max=torch.finfo(torch.float32).max)
        usable = (used > 0) & used.isfinite()
        scale.copy_(torch.where(usable, updated, scale.reshape(used.shape)).reshape(scale.shape))

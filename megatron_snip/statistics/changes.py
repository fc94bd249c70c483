"""What the probe changed at the sampled tokens of one linear, and how much of it is rounding.

    dX = X under the probe - X        dG = G under the probe - G

Their sums of squares, noise apart, tell the probe's signal-to-noise ratio (probe_quality.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from megatron_snip.statistics.observation import Observation
from megatron_snip.topology import Placement


@dataclass(frozen=True)
class Changes:
    """What the probe changed at R sampled tokens, of this shard, FP32.

    Attributes:
        input: dX [R, K].
        grad: dG [R, N].
        input_noise: [R, K], variance that rounding alone gives dX; None in FP32 compute.
        grad_noise: [R, N], likewise of dG.
    """

    input: torch.Tensor
    grad: torch.Tensor
    input_noise: torch.Tensor | None
    grad_noise: torch.Tensor | None


def take_changes(placement: Placement, seen: Observation, num_probes: int = 1) -> Changes:
    """Compare what the probe showed with pass A, and add one probe's part to `seen.probe`.

    Args:
        placement: which linear.
        seen: an observation that the probe has visited.
        num_probes: over how many probes the sums are averaged.
    """
    assert seen.sampled is not None
    assert seen.probed is not None
    input_change, input_noise = _change(seen.probed.input, seen.sampled.input)
    grad_change, grad_noise = _change(seen.probed.grad, seen.sampled.grad)
    column, share = placement.kind == "column", 1.0 / placement.tensor.size
    parts = (input_change.square(), input_noise, grad_change.square(), grad_noise)
    shares = (share, share, 1.0, 1.0) if column else (1.0, 1.0, share, share)
    for i, (part, weight) in enumerate(zip(parts, shares, strict=True)):
        if part is not None:
            seen.probe[i] += part.sum(dtype=torch.float64) * (weight / num_probes)
    return Changes(input_change, grad_change, input_noise, grad_noise)


def _change(new: torch.Tensor, old: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return new - old, FP32, and the variance that rounding alone gives it.

    A BF16 or FP16 value carries a rounding error of variance ulp^2 / 12, and two are compared;
    an FP32 value's is far below any signal (None).
    """
    change = new.float() - old.float()
    if new.dtype == torch.float32:
        return change, None
    bits = -math.log2(torch.finfo(new.dtype).eps)
    ulp = torch.exp2(torch.frexp(old.float())[1].float() - 1 - bits)
    return change, (ulp.square() / 6).where(old != 0, 0)

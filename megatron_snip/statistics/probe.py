"""Pass B: perturb all weights at once, run the same microbatches, read what changed.

With W_k -> W_k + eps * D_k * r_k, r random signs and D_k normalized by |update_k|,

    E |dG_t / eps|^2 = sum_k |D_k d2L / dW_k dY_t|^2     (mixed partials are symmetric)
    E |dX_t / eps|^2 = sum_{k below} |D_k dX_t / dW_k|^2 (backprop is the transpose)

so one forward-backward gives every linear the sensitivity of all weights' next updates to an
error in its output (dG) and in its input gradient (dX), without a Hessian; `coupling.py` joins
them with the errors. This takes the place of the two noise injections of SNIP (arXiv:2602.01410,
Sec. 4).

Weights come back bitwise: the buffer that held D holds the original values meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megatron_snip.statistics.observation import Observation, ProbedRows
from megatron_snip.statistics.tap import all_tokens, tap
from megatron_snip.streams import random_signs
from megatron_snip.topology import Placement


@dataclass
class ProbedWeight:
    """One weight under the probe.

    Attributes:
        placement: which linear.
        weight: [N, K] of this shard; changed in place between `perturb` and `restore`.
        buffer: [N, K], FP32 or the weight's dtype: D (not normalized), then the original weight.
        update_norm: |update_k| over the whole linear, which normalizes D.
        saved: whether `buffer` holds the original weight.
    """

    placement: Placement
    weight: torch.Tensor
    buffer: torch.Tensor
    update_norm: float
    saved: bool = False


def probe_step(relative_step: float, weight_square: float, direction_square: float) -> float:
    """Return eps such that |eps D r| = relative_step |W| over all linears together.

    Args:
        relative_step: size of the perturbation relative to the weights.
        weight_square: sum over linears of |W_k|^2.
        direction_square: sum over linears of |D_k|^2 / |update_k|^2.

    Raises:
        ValueError: if a sum is not finite or there is no direction.
    """
    if not (0 < direction_square < math.inf and 0 < weight_square < math.inf):
        raise ValueError(
            f"the probe needs finite, nonzero weights and sensitivities, got |W|^2 = "
            f"{weight_square} and |D|^2 = {direction_square}"
        )
    return relative_step * math.sqrt(weight_square / direction_square)


@torch.no_grad()
def perturb(
    probed: ProbedWeight, eps: float, seed: int, step: int, draw: int = 0
) -> tuple[float, float]:
    """Add eps D r to one weight in place.

    Returns:
        (square norm of what was added after rounding to the weight's dtype, of what was meant).
    """
    signs = random_signs(seed, probed.placement, step, draw, probed.weight.device)
    change = (probed.buffer.float() * signs).mul_(eps / probed.update_norm)  # not the buffer
    # The original is safe before the weight changes: whatever fails later can be undone.
    probed.buffer.copy_(probed.weight.data)
    probed.saved = True
    original = probed.buffer.float()
    probed.weight.data.copy_(original + change)
    intended = float(torch.linalg.vector_norm(change)) ** 2
    applied = float(torch.linalg.vector_norm(probed.weight.data.float() - original)) ** 2
    return applied, intended


@torch.no_grad()
def restore(probed: ProbedWeight) -> None:
    """Put the original weight back, bitwise; nothing to do if it was not changed."""
    if probed.saved:
        probed.weight.data.copy_(probed.buffer)
        probed.saved = False


class Comparer:
    """Keeps X and G of the tokens that pass A sampled; see `tap.Observer`.

    Attributes:
        failure: the first error met on this rank, or None.
    """

    def __init__(self, observations: Mapping[str, list[Observation]]) -> None:
        """Start before the first microbatch.

        Args:
            observations: what pass A kept, by instance, in microbatch order.
        """
        self.failure: str | None = None
        self._observations = observations
        self._seen: dict[str, int] = {}

    def observe(
        self,
        placement: Placement,
        input: torch.Tensor,
        weight: torch.Tensor,
        output: torch.Tensor,
        sequence_parallel: bool,
    ) -> torch.Tensor:
        """See `tap.Observer`."""

        def on_backward(x: torch.Tensor, _: torch.Tensor, g: torch.Tensor) -> None:
            with torch.no_grad():
                tokens = all_tokens(x, placement.tensor, sequence_parallel)
                try:
                    self._compare(placement, tokens, g.reshape(-1, g.shape[-1]))
                except Exception as error:
                    text = f"{placement.name}: {type(error).__name__}: {error}"
                    self.failure = self.failure or text

        return tap(output, input, weight, on_backward)

    def _compare(self, placement: Placement, x: torch.Tensor, g: torch.Tensor) -> None:
        index = self._seen.get(placement.instance, 0)
        self._seen[placement.instance] = index + 1
        seen = self._observations[placement.instance][index]
        if x.shape[0] != seen.grad.numel():
            return  # an expert was sent other tokens than in pass A: nothing to compare
        seen.probed = ProbedRows(x[seen.rows], g[seen.rows])

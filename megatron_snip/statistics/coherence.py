"""The square of a sum over all tokens, estimated from a sample of them.

    (sum_t a_t)^2 = sum_t a_t^2 + sum_{t != u} a_t a_u        diagonal and off-diagonal

Both scale without bias from the pairs sampled to the pairs there are, and add up over shards,
microbatches and ranks before they are joined. The sums themselves go to `sketch.py`.
"""

from __future__ import annotations

import torch


def coherent_parts(
    terms: torch.Tensor, noise: torch.Tensor | None, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Estimate sum_c (sum over all tokens of terms_tc)^2 from sampled tokens, without bias.

    sum_t a_t^2 over the sample stands for the diagonal, (sum_t a_t)^2 - sum_t a_t^2 for the
    off-diagonal; each is scaled from pairs sampled to pairs there are. The two add up over
    shards, microbatches and ranks before `coherent_square` joins them.

    Args:
        terms: [R, C], the sampled tokens' terms.
        noise: [R, C], variance of the terms that is not signal, or None.
        num_tokens: M >= R.

    Returns:
        [2] FP64: diagonal less noise, off-diagonal; and [C] FP64, the sums over all tokens.
    """
    sampled = terms.shape[0]
    diagonal = terms.square().sum(dtype=torch.float64)
    sums = terms.sum(dim=0, dtype=torch.float64)
    off_diagonal = sums.square().sum() - diagonal
    signal = diagonal if noise is None else diagonal - noise.sum(dtype=torch.float64)
    whole, pairs = num_tokens / max(sampled, 1), 0.0
    if sampled > 1:
        pairs = num_tokens * (num_tokens - 1) / (sampled * (sampled - 1))
    return torch.stack([signal * whole, off_diagonal * pairs]), sums * whole


def coherent_square(diagonal: float, off_diagonal: float, all_sampled: bool) -> float:
    """Join summed parts, >= 0; of a sample, a negative off-diagonal is chance and counts as 0."""
    if all_sampled:
        return _at_least_0(diagonal + off_diagonal)
    return _at_least_0(diagonal) + _at_least_0(off_diagonal)


def _at_least_0(value: float) -> float:
    return 0.0 if value < 0 else value  # NaN stays

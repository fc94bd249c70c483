"""The square of a sum over all tokens, estimated from a sample of them.

    (sum_t a_t)^2 = sum_t a_t^2 + sum_{t != u} a_t a_u        diagonal and off-diagonal

Both scale without bias from the pairs sampled to the pairs there are. Neither needs the terms one
by one: the sample comes in groups, and products of different groups' sums S_j hold pairs of
different tokens only,

    (sum_j S_j)^2 - sum_j S_j^2 = sum over pairs of tokens of different groups

while what the groups' own squares have beyond such pairs is the diagonal. The two parts add up over
shards, microbatches and ranks before they are joined. The sums go to `sketch.py`, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

GROUPS = 4
"""Of G groups, 1 - 1/G of a sample's pairs are of different groups."""


@dataclass(frozen=True)
class Sample:
    """R sampled tokens of M, in groups.

    Attributes:
        sizes: tokens of each group; group j has the rows j, j + G, j + 2 G, ... of the sample.
        num_tokens: M.
    """

    sizes: tuple[int, ...]
    num_tokens: int

    @classmethod
    def of(cls, num_sampled: int, num_tokens: int, noisy: bool) -> Sample:
        """Form groups; one is enough where all tokens are sampled and no noise comes off."""
        count = 1 if num_sampled >= num_tokens and not noisy else min(GROUPS, num_sampled)
        count = max(count, 1)
        return cls(tuple(len(range(j, num_sampled, count)) for j in range(count)), num_tokens)

    @property
    def num_sampled(self) -> int:
        """R."""
        return sum(self.sizes)

    @property
    def groups(self) -> list[slice]:
        """Which rows of the sample each group has."""
        return [slice(j, None, len(self.sizes)) for j in range(len(self.sizes))]

    def over_all(self, sums: torch.Tensor) -> torch.Tensor:
        """[G, C], over each group's tokens, to [C]: over all M, of which the sample stands."""
        return sums.sum(0) * (self.num_tokens / max(self.num_sampled, 1))


def coherent_parts(
    sums: torch.Tensor, sample: Sample, signal: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Estimate sum_c (sum over all tokens of terms_tc)^2, without bias.

    Args:
        sums: [G, C] FP64, over each group's tokens.
        sample: what was sampled, in G groups.
        signal: [C], the share of a channel's diagonal that is not noise; None: all of it.

    Returns:
        [2] FP64: diagonal less noise, off-diagonal; and the noise that was taken off. Of one group
        there is nothing to tell the two parts apart by: all of its square counts as diagonal.
    """
    sampled, tokens = sample.num_sampled, sample.num_tokens
    whole, square = sums.sum(0).square(), sums.square().sum(0)
    crossing = float(sampled**2 - sum(size**2 for size in sample.sizes))
    if crossing == 0:
        diagonal, off_diagonal = square, torch.zeros_like(square)
    else:
        pair = (whole - square) / crossing
        diagonal = square - pair * float(sum(size * (size - 1) for size in sample.sizes))
        off_diagonal = pair * (tokens * (tokens - 1.0))
    if sampled >= tokens:  # every pair was seen
        off_diagonal = whole - diagonal
    diagonal = diagonal * (tokens / max(sampled, 1))
    noise = torch.zeros_like(diagonal) if signal is None else diagonal * (1.0 - signal)
    return torch.stack([(diagonal - noise).sum(), off_diagonal.sum()]), noise.sum()


def sampling_variance(diagonal: float, microbatches: float, tokens: float, sampled: float) -> float:
    """Return the variance of ONE channel's off-diagonal that its sample of tokens alone gives.

    R of M tokens show (1 - 1/G) R^2 pairs in place of M^2: of terms that do not go together, the
    sum over pairs scatters by sqrt(2) M / R diagonals, less where all are sampled.

    Args:
        diagonal: summed over microbatches of about one size.
        microbatches: how many.
        tokens: M, of all of them.
        sampled: R, of all of them.
    """
    if microbatches <= 0 or not 0 < sampled < tokens:
        return 0.0
    seen, unseen = 1.0 - 1.0 / GROUPS, 1.0 - sampled / tokens
    return 2.0 * (diagonal * tokens / sampled) ** 2 * unseen / (seen * microbatches)


def coherent_square(diagonal: float, off_diagonal: float, as_one: bool) -> float:
    """Join summed parts, >= 0.

    Args:
        diagonal: less noise.
        off_diagonal: of a sample and many channels, a negative one is chance and counts as 0.
        as_one: count only the sum of both as 0 where it is negative: where all tokens are
            sampled, and of a single channel, whose off-diagonal is negative as often as not.
    """
    if as_one:
        return _at_least_0(diagonal + off_diagonal)
    return _at_least_0(diagonal) + _at_least_0(off_diagonal)


def _at_least_0(value: float) -> float:
    return 0.0 if value < 0 else value  # NaN stays

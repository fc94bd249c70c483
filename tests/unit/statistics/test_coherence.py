"""The square of a sum over tokens from a sample of them: its bias, its parts, its noise."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch

from megatron_snip.statistics.coherence import coherent_parts, coherent_square


def square(terms: torch.Tensor, noise: torch.Tensor | None, tokens: int) -> float:
    diagonal, off = coherent_parts(terms, noise, tokens)[0].tolist()
    return coherent_square(diagonal, off, len(terms) == tokens)


def test_all_tokens_give_the_square_of_their_sum() -> None:
    terms = torch.tensor([[1.0, 2.0], [3.0, -1.0]])  # sums 4 and 1
    assert square(terms, None, 2) == pytest.approx(17.0)


def test_a_sample_is_unbiased() -> None:
    """The mean over all samples of 3 of 6 tokens is the square over all 6."""
    terms = torch.randn((6, 4), generator=torch.Generator().manual_seed(0))
    whole = terms.double().sum(0).square().sum().item()
    found = [coherent_parts(terms[list(rows)], None, 6) for rows in combinations(range(6), 3)]
    parts = torch.stack([parts for parts, _ in found])
    assert parts.mean(0).sum().item() == pytest.approx(whole, rel=1e-6)
    sums = torch.stack([sums for _, sums in found])
    torch.testing.assert_close(sums.mean(0), terms.double().sum(0), rtol=1e-6, atol=1e-6)


def test_parts_add_up_over_shards() -> None:
    terms = torch.randn((5, 8), generator=torch.Generator().manual_seed(1))
    halves = [coherent_parts(half, None, 9)[0] for half in (terms[:, :4], terms[:, 4:])]
    torch.testing.assert_close(coherent_parts(terms, None, 9)[0], sum(halves))


def test_tokens_that_cancel_leave_their_own_squares() -> None:
    """Of a sample, a negative sum over pairs is chance: it must not make a square of nothing."""
    terms = torch.tensor([[1.0], [-1.0]])
    assert square(terms, None, 4) == pytest.approx(2.0 * 4 / 2)
    assert square(terms, None, 2) == pytest.approx(0.0)  # no sample, no chance


def test_noise_comes_off_the_diagonal_only() -> None:
    terms, noise = torch.tensor([[3.0], [3.0]]), torch.tensor([[4.0], [4.0]])
    assert square(terms, noise, 2) == pytest.approx((18 - 8) + 18)
    assert square(terms, 9 * noise, 2) == 0  # never below
    assert square(terms, 9 * noise, 4) == pytest.approx(18 * 6)  # 6 pairs for 1


def test_no_tokens_have_no_effect_and_nan_stays() -> None:
    assert square(torch.zeros((0, 3)), None, 0) == 0.0
    assert square(torch.ones((1, 3)), None, 5) == pytest.approx(15.0)
    assert math.isnan(square(torch.full((2, 3), torch.nan), None, 5))

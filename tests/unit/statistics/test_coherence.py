"""The square of a sum over tokens from a sample of them: its bias, its parts, its noise."""

from __future__ import annotations

import math
from itertools import combinations, permutations

import pytest
import torch

from megatron_snip.statistics.coherence import (
    GROUPS,
    Sample,
    coherent_parts,
    coherent_square,
    sampling_variance,
)


def parts(
    terms: torch.Tensor, tokens: int, noisy: bool = False, signal: float = 1.0
) -> list[float]:
    sample = Sample.of(len(terms), tokens, noisy)
    sums = torch.stack([terms[rows].double().sum(0) for rows in sample.groups])
    share = torch.full((terms.shape[1],), signal) if noisy else None
    found: list[float] = coherent_parts(sums, sample, share)[0].tolist()
    return found


def square(terms: torch.Tensor, tokens: int) -> float:
    return coherent_square(*parts(terms, tokens), len(terms) == tokens)


def test_all_tokens_give_the_square_of_their_sum() -> None:
    terms = torch.tensor([[1.0, 2.0], [3.0, -1.0]])  # sums 4 and 1
    assert square(terms, 2) == pytest.approx(17.0)


@pytest.mark.parametrize(("sampled", "tokens"), [(3, 5), (2, 4), (6, 6), (5, 6)])
def test_a_sample_in_random_order_is_unbiased(sampled: int, tokens: int) -> None:
    """The mean over all samples, in all orders, is the square over all tokens, part by part."""
    terms = torch.randn((tokens, 4), generator=torch.Generator().manual_seed(0))
    whole = terms.double().sum(0).square().sum().item()
    diagonal = terms.double().square().sum().item()
    orders = permutations(range(tokens), sampled)
    found = torch.tensor([parts(terms[list(rows)], tokens, noisy=True) for rows in orders])
    assert found.mean(0).tolist() == pytest.approx([diagonal, whole - diagonal], rel=1e-4)
    samples = [Sample.of(sampled, tokens, noisy=False)] * 2
    sums = [
        samples[0].over_all(torch.stack([terms[list(rows)][g].sum(0) for g in samples[0].groups]))
        for rows in combinations(range(tokens), sampled)
    ]
    torch.testing.assert_close(torch.stack(sums).mean(0), terms.sum(0))


def test_groups_take_every_token_of_the_sample_once() -> None:
    for sampled in (1, 3, 4, 5, 11):
        sample = Sample.of(sampled, 20, noisy=False)
        taken = [i for rows in sample.groups for i in range(sampled)[rows]]
        assert sorted(taken) == list(range(sampled))
        assert sample.sizes == tuple(len(range(sampled)[rows]) for rows in sample.groups)
        assert len(sample.sizes) == min(GROUPS, sampled)
        assert sample.num_sampled == sampled
    assert Sample.of(20, 20, noisy=False).sizes == (20,)


def test_parts_add_up_over_shards() -> None:
    terms = torch.randn((5, 8), generator=torch.Generator().manual_seed(1))
    left, right = parts(terms[:, :4], 9), parts(terms[:, 4:], 9)
    assert parts(terms, 9) == pytest.approx([a + b for a, b in zip(left, right, strict=True)])


def test_tokens_that_cancel_leave_their_own_squares() -> None:
    """Of a sample, a negative sum over pairs is chance: it must not make a square of nothing."""
    terms = torch.tensor([[1.0], [-1.0]])
    assert square(terms, 4) == pytest.approx(2.0 * 4 / 2)
    assert square(terms, 2) == pytest.approx(0.0)  # no sample, no chance


def test_noise_comes_off_the_diagonal_only() -> None:
    terms = torch.tensor([[3.0], [3.0]])
    assert parts(terms, 2, noisy=True, signal=0.5) == pytest.approx([9.0, 18.0])
    assert parts(terms, 4, noisy=True, signal=-1.0) == pytest.approx([-36.0, 18.0 * 6])
    assert coherent_square(-36.0, 108.0, as_one=False) == 108.0
    assert coherent_square(-36.0, 18.0, as_one=True) == 0.0  # never below


def test_no_tokens_have_no_effect_and_nan_stays() -> None:
    assert square(torch.zeros((0, 3)), 0) == 0.0
    assert square(torch.ones((1, 3)), 5) == pytest.approx(15.0)
    assert math.isnan(square(torch.full((2, 3), torch.nan), 5))


@pytest.mark.parametrize(("sampled", "tokens", "microbatches"), [(40, 320, 1), (40, 80, 4)])
def test_the_variance_of_a_sample_s_pairs(sampled: int, tokens: int, microbatches: int) -> None:
    """Of one channel whose terms do not go together, over many draws of both."""
    generator = torch.Generator().manual_seed(7)
    draws = []
    for _ in range(1500):
        terms = torch.randn((microbatches, sampled, 1), generator=generator)
        draws.append(sum(parts(one, tokens)[1] for one in terms))
    # Of the pairs that were seen; those of the sample are themselves drawn from all.
    seen = torch.tensor(draws, dtype=torch.float64).var().item()
    predicted = sampling_variance(microbatches * tokens, microbatches, tokens, sampled)
    assert predicted == pytest.approx(seen * (1 - sampled / tokens), rel=0.2)
    assert sampling_variance(5.0, 1, 10, 10) == sampling_variance(5.0, 0, 10, 5) == 0.0

"""The sample of tokens is a function of (seed, step, microbatch) alone."""

import pytest
import torch

from megatron_snip.statistics.sampling import sampled_rows


def test_rows_are_distinct_repeatable_and_in_random_order() -> None:
    rows = sampled_rows(1000, 50, seed=1, step=2, microbatch=3)
    assert rows.numel() == rows.unique().numel() == 50
    assert not torch.equal(rows, rows.sort().values)
    assert rows.min() >= 0 and rows.max() < 1000
    assert torch.equal(rows, sampled_rows(1000, 50, 1, 2, 3))


@pytest.mark.parametrize("other", [(2, 2, 3), (1, 3, 3), (1, 2, 4), (2**31 - 1, 2, 3)])
def test_another_seed_step_or_microbatch_takes_others(other: tuple[int, int, int]) -> None:
    assert not torch.equal(sampled_rows(1000, 50, *other), sampled_rows(1000, 50, 1, 2, 3))


def test_every_token_is_as_likely() -> None:
    counts = torch.zeros(20)
    for step in range(2000):
        counts[sampled_rows(20, 5, 0, step, 0)] += 1
    # Binomial(2000, 1/4): 500 +- 19.4; five standard deviations.
    assert (counts - 500).abs().max() < 97


@pytest.mark.parametrize(("tokens", "count"), [(7, 7), (7, 100), (0, 5)])
def test_few_tokens_are_all_taken(tokens: int, count: int) -> None:
    assert sorted(sampled_rows(tokens, count, 0, 0, 0).tolist()) == list(range(tokens))


def test_all_tokens_come_in_random_order_too() -> None:
    """Groups of a sample are samples; in their own order every fourth token is one sequence's."""
    assert sampled_rows(100, 100, 0, 0, 0).tolist() != list(range(100))


def test_training_s_random_numbers_are_left_alone() -> None:
    before = torch.get_rng_state()
    sampled_rows(1000, 50, 1, 2, 3)
    assert torch.equal(torch.get_rng_state(), before)

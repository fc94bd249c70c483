"""Pooling scale^2 over linears of a kind."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megatron_snip.statistics.pooling import joined_square, kind_of, pooled_across, pooled_squares

FC1 = [f"decoder.layers.{i}.mlp.linear_fc1" for i in range(40)]
QKV = [f"decoder.layers.{i}.self_attention.linear_qkv" for i in range(40)]


def test_a_kind_is_a_name_without_its_numbers() -> None:
    assert kind_of(FC1[0]) == kind_of(FC1[17])
    assert kind_of(FC1[0]) != kind_of(QKV[0])
    assert kind_of(FC1[0]) != kind_of("decoder.layers.0.mlp.linear_fc2")
    experts = [f"decoder.layers.3.mlp.experts.linear_fc{i}" for i in (1, 2)]
    assert kind_of(experts[0]) != kind_of(experts[1])
    assert kind_of("mtp.layers.0.mlp.linear_fc1") != kind_of(FC1[0])


def test_pooling_takes_the_chance_out() -> None:
    """Channels' sums are known well, the whole has one degree of freedom, ratios go by kind."""
    rng = np.random.default_rng(0)
    names = FC1 + QKV
    channels = rng.uniform(1.0, 9.0, 80)
    true = channels * np.repeat([9.0, 0.25], 40)
    sampled = true * rng.standard_normal(80) ** 2
    pooled = np.array(pooled_squares(names, list(sampled), list(channels)))
    assert np.abs(np.log(pooled / true)).mean() < 0.5 * np.abs(np.log(sampled / true)).mean()
    assert pooled.sum() == pytest.approx(true.sum(), rel=0.5)


def test_the_only_linear_of_its_kind_keeps_its_own() -> None:
    assert pooled_squares(["output_layer"], [6.0], [2.0]) == pytest.approx([6.0])


def test_two_of_a_kind_by_hand() -> None:
    """rho = (4 + 0) / 2 = 2; a quarter is the linear's own."""
    assert pooled_squares(FC1[:2], [4.0, 0.0], [1.0, 3.0]) == pytest.approx([2.5, 4.5])


def test_more_probes_let_a_linear_differ_from_its_kind() -> None:
    """rho = 2 as above; of 9 samples and PRIOR, three quarters are the linear's own."""
    assert pooled_squares(FC1[:2], [4.0, 0.0], [1.0, 3.0], 9) == pytest.approx([3.5, 1.5])


def test_a_ratio_of_noise_does_not_spoil_its_kind() -> None:
    """Of channel^2 in BF16 next to nothing may be left when its noise is taken off."""
    squares, channels = [1.0, 1.0, 2.0, 1.0], [1.0, 1e-9, 1.0, 1.0]
    pooled = pooled_squares(FC1[:4], squares, channels)
    assert max(pooled) < 16


def test_what_the_probe_did_not_reach_stays_at_zero_and_nan_stays_alone() -> None:
    assert pooled_squares(FC1[:2], [0.0, 8.0], [0.0, 2.0]) == pytest.approx([0.0, 8.0])
    spoilt, good = pooled_squares(FC1[:2], [math.nan, 8.0], [1.0, 2.0])
    assert math.isnan(spoilt)
    assert good == pytest.approx(8.0)
    assert pooled_squares([], [], []) == []


def test_what_microbatches_share_is_pooled_with_its_sign() -> None:
    """rho = (3 - 1) / 2 = 1; a quarter is the linear's own."""
    four = [4.0, 4.0]
    assert pooled_across(FC1[:2], [3.0, -2.0], [1.0, 2.0], four) == pytest.approx([1.5, 1.0])
    assert pooled_across(FC1[:2], [-3.0, -2.0], [1.0, 0.0], four) == pytest.approx([-3.0, -2.0])
    assert pooled_across(["output_layer"], [-1.0], [2.0], [4.0]) == pytest.approx([-1.0])


def test_what_noise_left_of_a_square_does_not_spoil_what_its_kind_shares() -> None:
    """Of 4 microbatches' sums none has a square beyond 4 times their own: 2 M = 8 bounds it."""
    pooled = pooled_across(FC1[:4], [0.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1e-9], [4.0] * 4)
    assert pooled[:3] == pytest.approx([1.5] * 3)  # 3 rho / 4, rho = 8 / 4
    assert pooled[3] == pytest.approx(0.25)
    pooled = pooled_across(FC1[:2], [0.0, -1.0], [1.0, 1e-9], [4.0] * 2)
    assert pooled[0] == pytest.approx(-3.0)


def test_samples_of_the_whole_count_for_what_they_are_worth() -> None:
    assert joined_square(6.0, 0.0, 3.0, 1) == pytest.approx((6 + 8 * 3) / 9)
    assert joined_square(6.0, 0.0, 3.0, 16) == pytest.approx((16 * 6 + 8 * 3) / 24)
    # A variance as large as the sample's own halves it; of nothing but noise, the estimate is left.
    assert joined_square(6.0, 18.0, 3.0, 2) == pytest.approx((6 + 8 * 3) / 9)
    assert joined_square(6.0, 1e9, 3.0, 2) == pytest.approx(3.0, rel=1e-6)
    assert joined_square(0.0, 0.0, 0.0, 1) == joined_square(6.0, 1.0, 0.0, 1) == 0.0
    assert math.isnan(joined_square(math.nan, 1.0, 3.0, 1))

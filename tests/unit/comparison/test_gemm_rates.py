"""Predicted step times."""

from __future__ import annotations

import pytest

from megatron_snip.comparison.gemm_rates import (
    BLACKWELL,
    HOPPER,
    REFERENCE,
    other_flops_per_token,
    relative_step_time,
)
from megatron_snip.trainer.config import linear_shapes


def test_bf16_is_one() -> None:
    assert relative_step_time({"bf16": 1.0}, HOPPER) == pytest.approx(1.0)
    assert relative_step_time({"bf16": 1.0}, BLACKWELL) == pytest.approx(1.0)


def test_a_format_that_the_device_lacks_runs_as_the_next_wider_one() -> None:
    for name in ("fp4", "nvfp4", "fp3"):
        assert HOPPER.rate(name) == HOPPER.rate("fp8")
        assert BLACKWELL.rate(name) == 4 * BLACKWELL.rate("bf16")


def test_times_add_by_share() -> None:
    linear = sum(s.flops_per_token for s in linear_shapes(REFERENCE))
    other = other_flops_per_token(REFERENCE)
    expected = (other + linear * (0.75 / 4 + 0.25 / 2)) / (other + linear)
    shares = {"fp8": 0.25, "fp4": 0.75}
    assert relative_step_time(shares, BLACKWELL) == pytest.approx(expected)


def test_the_reference_model_has_the_known_flops() -> None:
    linear = sum(s.flops_per_token for s in linear_shapes(REFERENCE))
    # 68.5e9 weights in the blocks' linears of Llama 2 70B, six FLOPs each and token.
    assert linear == pytest.approx(6 * 68.45e9, rel=0.002)
    # Causal attention: 3 * 80 layers * 2 s h, and the output layer: 6 h v.
    assert other_flops_per_token(REFERENCE) == pytest.approx(
        3 * 80 * 2 * 4096 * 8192 + 6 * 8192 * 32000
    )

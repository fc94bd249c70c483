"""Loss divergence, weight divergence and the local errors of the baselines."""

import math

import pytest

from megatron_snip.divergence.quality_loss import (
    absolute_error,
    fprop_scale,
    loss_divergence,
    relative_error,
    weight_divergence,
)
from megatron_snip.options import Option
from megatron_snip.statistics.records import LinearStatistics
from tests.unit.divergence.build import errors, linear

FP8, FP4, BF16 = map(Option.uniform, ("fp8", "fp4", "bf16"))
# fp8: |eX| = 1 of |X| = 10, |eW| = 2 of |W| = 20, |eG| = 0.5 of |G| = 5; fp4: 16 times as much.
X, W, G = 1.0, 2.0, 0.5


def test_only_fprop_s_format_changes_the_loss() -> None:
    assert loss_divergence(linear(), FP8, "fisher") == 7.0
    assert loss_divergence(linear(), FP8, "first_plus_fisher") == 2.0 + 7.0
    assert loss_divergence(linear(), Option("fp8", "fp4", "fp4"), "fisher") == 7.0
    assert loss_divergence(linear(), Option("bf16", "fp4", "fp4"), "fisher") == 0.0


def test_every_gemm_counts_its_two_operands() -> None:
    assert absolute_error(linear(), FP8) == pytest.approx(2 * (X + W + G))
    assert relative_error(linear(), FP8) == pytest.approx(6 * 0.1)
    mixed = Option("fp4", "bf16", "fp8")
    assert absolute_error(linear(), mixed) == pytest.approx(16 * (X + W) + (G + X))
    assert relative_error(linear(), mixed) == pytest.approx(16 * 0.2 + 0.2)
    assert absolute_error(linear(), BF16) == 0.0
    zeros = LinearStatistics("l", 0, 1, 1, 6.0, formats=linear().formats)
    assert relative_error(zeros, FP8) == 0.0


@pytest.mark.parametrize(
    ("option", "square"),
    [
        ("fp8", 3 * 8 + 8 + 64),
        ("fp8-bf16-bf16", 3 * 8),
        ("bf16-fp8-bf16", 8),
        ("bf16-bf16-fp8", 64),
        ("fp4-fp8-bf16", 3 * 8 * 256 + 8),
        ("bf16", 0),
    ],
)
def test_parts_add_in_squares(option: str, square: float) -> None:
    found = weight_divergence(linear(), Option.parse(option), kappa=3.0)
    assert found == pytest.approx(math.sqrt(square))


@pytest.mark.parametrize(("microbatches", "ratio"), [(1.0, 4.0), (4.0, 8.0), (64.0, 32.0)])
def test_fprop_s_share_grows_with_the_root_of_the_microbatches(
    microbatches: float, ratio: float
) -> None:
    linears = [
        linear(i, microbatches=microbatches, fp4=errors(1.0 + i), fp8=errors(9.0)) for i in range(3)
    ]
    kappa = fprop_scale(linears, "fp4")
    forward = sum(weight_divergence(s, Option("fp4", "bf16", "bf16"), kappa) ** 2 for s in linears)
    wgrad = sum(weight_divergence(s, Option("bf16", "bf16", "fp4"), kappa) ** 2 for s in linears)
    assert forward == pytest.approx(ratio * wgrad)


def test_without_a_gradient_nothing_is_scaled() -> None:
    assert fprop_scale([linear(0, fp4=errors(1.0, aligned_fisher=0.0))], "fp4") == 0.0
    assert fprop_scale([linear(0, fp4=errors(1.0, aligned_fisher=math.nan))], "fp4") == 0.0

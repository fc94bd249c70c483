"""Local errors of the baselines."""

import pytest

from megatron_snip.divergence.divergence import absolute_error, relative_error
from megatron_snip.options import Option
from megatron_snip.statistics.records import LinearStatistics
from tests.unit.divergence.build import linear

# fp8: |eX| = 1 of |X| = 10, |eW| = 2 of |W| = 20, |eG| = 0.5 of |G| = 5; fp4: 16 times as much.
X, W, G = 1.0, 2.0, 0.5


def test_every_gemm_counts_its_two_operands() -> None:
    assert absolute_error(linear(), Option.uniform("fp8")) == pytest.approx(2 * (X + W + G))
    assert relative_error(linear(), Option.uniform("fp8")) == pytest.approx(6 * 0.1)
    mixed = Option("fp4", "bf16", "fp8")
    assert absolute_error(linear(), mixed) == pytest.approx(16 * (X + W) + (G + X))
    assert relative_error(linear(), mixed) == pytest.approx(16 * 0.2 + 0.2)
    assert absolute_error(linear(), Option.uniform("bf16")) == 0.0


def test_a_tensor_of_zeros_has_no_relative_error() -> None:
    empty = LinearStatistics("l", 0, 1, 1, 6.0, formats=linear().formats)
    assert relative_error(empty, Option.uniform("fp8")) == 0.0

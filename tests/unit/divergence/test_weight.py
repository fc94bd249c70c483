"""Weight divergence: each GEMM's format decides one of its three parts."""

import math

import pytest

from megatron_snip.divergence.divergence import fprop_scale, weight_divergence
from megatron_snip.options import Option
from tests.unit.divergence.build import errors, linear


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


def test_a_format_that_was_not_measured_is_an_error() -> None:
    with pytest.raises(KeyError):
        weight_divergence(linear(fp8=errors(1.0)), Option("fp8", "fp8", "fp4"), 1.0)

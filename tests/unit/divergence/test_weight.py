"""Weight divergence: each GEMM's format decides one of its three parts."""

import math

import pytest

from megatron_snip.divergence.weight import weight_divergence
from megatron_snip.options import Option
from tests.unit.divergence.build import errors, linear


@pytest.mark.parametrize(
    ("option", "square"),
    [
        ("fp8", 9 + 16 + 144),
        ("fp8-bf16-bf16", 9),
        ("bf16-fp8-bf16", 16),
        ("bf16-bf16-fp8", 144),
        ("fp4-fp8-bf16", 9 * 256 + 16),
        ("bf16", 0),
    ],
)
def test_parts_add_in_squares(option: str, square: float) -> None:
    assert weight_divergence(linear(), Option.parse(option)) == pytest.approx(math.sqrt(square))


def test_a_format_that_was_not_measured_is_an_error() -> None:
    with pytest.raises(KeyError):
        weight_divergence(linear(fp8=errors(1.0)), Option("fp8", "fp8", "fp4"))

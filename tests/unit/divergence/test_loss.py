"""Loss divergence: what fprop's format does to the loss."""

from typing import get_args

import pytest

from megatron_snip.config import LossJoin
from megatron_snip.divergence.loss import JOINS, loss_divergence
from megatron_snip.options import Option
from tests.unit.divergence.build import errors, linear


@pytest.mark.parametrize(
    ("join", "wanted"),
    [
        ("fisher", 7.0),
        ("first_plus_fisher", 2.0 + 7.0),
    ],
)
def test_the_named_ways_to_join(join: str, wanted: float) -> None:
    assert loss_divergence(linear(), Option.uniform("fp8"), join) == wanted  # type: ignore[arg-type]


def test_every_way_of_the_settings_is_there() -> None:
    assert set(JOINS) == set(get_args(LossJoin))


def test_only_the_forward_gemm_counts() -> None:
    value = loss_divergence(linear(), Option("fp8", "fp4", "fp4"), "fisher")
    assert value == loss_divergence(linear(), Option.uniform("fp8"), "fisher") == 7.0
    assert loss_divergence(linear(), Option("bf16", "fp4", "fp4"), "fisher") == 0.0


def test_a_format_that_was_not_measured_is_an_error() -> None:
    with pytest.raises(KeyError):
        loss_divergence(linear(fp8=errors(1.0)), Option.uniform("fp4"), "fisher")

"""Loss divergence: what fprop's format does to the loss."""

import pytest

from megatron_snip.divergence.divergence import loss_divergence
from megatron_snip.options import Option
from tests.unit.divergence.build import errors, linear


@pytest.mark.parametrize(
    ("estimator", "wanted"),
    [
        ("fisher", 7.0),
        ("first_plus_fisher", 2.0 + 7.0),
    ],
)
def test_the_estimators(estimator: str, wanted: float) -> None:
    assert loss_divergence(linear(), Option.uniform("fp8"), estimator) == wanted  # type: ignore[arg-type]


def test_only_the_forward_gemm_counts() -> None:
    value = loss_divergence(linear(), Option("fp8", "fp4", "fp4"), "fisher")
    assert value == loss_divergence(linear(), Option.uniform("fp8"), "fisher") == 7.0
    assert loss_divergence(linear(), Option("bf16", "fp4", "fp4"), "fisher") == 0.0


def test_a_format_that_was_not_measured_is_an_error() -> None:
    with pytest.raises(KeyError):
        loss_divergence(linear(fp8=errors(1.0)), Option.uniform("fp4"), "fisher")

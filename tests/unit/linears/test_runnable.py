"""Which options the linears of a model can run, and what users read about the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_snip.config import SnipConfig
from megatron_snip.errors import UnsupportedError
from megatron_snip.linears.runnable import AvailableOptions, available_options, option_refusals
from megatron_snip.options import BF16, Option

FP8, FP4 = Option.uniform("fp8"), Option.uniform("fp4")
A, B, C = (f"decoder.layers.{i}.mlp.linear_fc1" for i in range(3))


class Linear:
    """A linear that refuses some options."""

    def __init__(self, name: str, **refused: str) -> None:
        self.placement: Any = SimpleNamespace(name=name)
        self.refused = refused

    def refusal(self, option: Option) -> str | None:
        return self.refused.get(str(option).replace("-", "_"))


def available(*linears: Linear, **config: Any) -> AvailableOptions:
    model: Any = SimpleNamespace(
        linears=linears,
        all_linears=[linear.placement for linear in linears],
        runtime=SimpleNamespace(topology=SimpleNamespace(control=None)),
        approximations=lambda options: [f"{len(options)} formats"],
    )
    return available_options(model, SnipConfig(**config))


def test_refusals_are_listed_by_option_and_linear() -> None:
    linears: Any = [Linear(A, fp4="no"), Linear(B)]
    found = option_refusals(linears, (FP4, FP8, FP4, BF16), None)
    assert found == {FP4: {A: "no"}, FP8: {}, BF16: {}}


def test_options_of_every_linear_come_without_warnings() -> None:
    found = available(Linear(A), Linear(B))
    assert (found.options, found.warnings, found.notes) == ((FP8, FP4), (), ("2 formats",))


def test_options_that_some_or_all_linears_refuse_come_with_a_warning() -> None:
    found = available(*(Linear(name, fp8="needs 9.0") for name in (A, B)))
    assert found.options == (FP4,)
    assert found.warnings == ("fp8 is not available to any linear: needs 9.0",)
    found = available(Linear(A, fp8="shape (5, 7)"), Linear(B, fp8="shape (7, 5)"), Linear(C))
    assert found.options == (FP8, FP4)
    (warning,) = found.warnings
    assert warning == "fp8 is not available to 2 of 3 linears: shape (5, 7); shape (7, 5)"
    (warning,) = available(*(Linear(f"{A}{i}", fp8=f"reason {i // 2}") for i in range(10))).warnings
    assert warning.endswith("reason 0; reason 1; reason 2 and 2 other reasons")


def test_the_lowest_precision_must_run_somewhere() -> None:
    refused = {"fp4": "no", "fp4_fp4_fp8": "no"}
    mixed = available(Linear(A, **refused), granularity="gemm").options
    assert FP4 not in mixed and Option.parse("fp4-fp8-fp8") in mixed
    with pytest.raises(UnsupportedError, match=r"no linear .* fp4.*--snip-formats.*need 10\.0"):
        available(Linear(A, fp4="NVFP4 GEMMs need 10.0"))


def test_measuring_for_other_machines_asks_for_no_support() -> None:
    found = available(Linear(A, fp4="no", fp8="no"), collect_only=True)
    assert (found.options, found.refusals, found.warnings) == ((FP8, FP4), {}, ())

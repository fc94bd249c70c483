"""Quantized linears in Megatron's own classes, sharded or not, against dequantized GEMMs."""

from typing import Any

import pytest

from tests.distributed.launch import run_ranks
from tests.distributed.layouts import PP2, SHARDED, SP, TP2

WORKERS = "tests.distributed.workers.linears"
LAYOUTS = {"tp": TP2, "tp sp": {**TP2, **SP}, "pp": PP2, "dp": SHARDED}
# FP32 results sum up to 512 products in another order; BF16 ones are rounded once more.
TOLERANCE = {"gated bf16": 2.0**-7}


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_gemms_are_those_of_the_dequantized_operands(ranks: int) -> None:
    for result in run_ranks(ranks, f"{WORKERS}:quantized_linears"):
        for case, options in result.items():
            for option, errors in options.items():
                check(f"{case} in {option}", errors, TOLERANCE.get(case, 2e-6))


def check(label: str, errors: dict[str, Any], tolerance: float) -> None:
    assert {"output", "input grad"} < set(errors)
    for key, error in errors.items():
        if isinstance(error, bool):
            assert error, f"{label}: {key}"
        else:
            assert error < tolerance, f"{label}: {key} is off by {error:.1e}"


def test_a_plan_of_bf16_is_bitwise_megatrons_own() -> None:
    for result in run_ranks(2, f"{WORKERS}:bf16_plan", {"layouts": LAYOUTS}):
        for name, (plain, planned) in result.items():
            assert plain == planned, name

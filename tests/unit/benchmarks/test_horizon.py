"""The fit finds what was put in, and the best plan is what exhaustive search finds."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from benchmarks import horizon
from megatron_snip.types import Gemm
from tests.unit.comparison.build import outcome

NAMES = ("decoder.layers.0.mlp.linear_fc1", "decoder.layers.0.mlp.linear_fc2")


def divergences(factor: float) -> dict[str, Any]:
    """Two linears, one twice as large and four times as sensitive."""
    return {
        "linears": [
            {
                "name": name,
                "flops": 2.0 - k,
                "statistics": {
                    "formats": {
                        "fp3": {
                            "fisher": factor * 0.01 * 4.0**-k,
                            "forward_square": (factor * 0.2 * 2.0**-k) ** 2,
                        }
                    }
                },
            }
            for k, name in enumerate(NAMES)
        ]
    }


def test_terms_are_sums_over_what_ran_low() -> None:
    statistics = horizon.statistics_of([divergences(0.5), divergences(1.5)], "fp3")
    assert statistics.flops == pytest.approx([2 / 3, 1 / 3])
    options = {NAMES[0]: {"fp3-fp8-fp8": 0.5, "fp8": 0.5}, NAMES[1]: {"fp8-fp3-fp3": 1.0}}
    run = dataclasses.replace(outcome("k", 2.0), options=options)
    terms = horizon.terms_of(run, statistics, "fp3")
    assert terms == pytest.approx([0.5 * 0.01, 0.5 * 0.2, 1 / 3, 1 / 3])


def test_the_fit_finds_coefficients_and_none_is_negative() -> None:
    generator = np.random.default_rng(1)
    terms = generator.uniform(0.0, 1.0, (30, 4))
    truth = np.array([2.0, 0.5, 0.0, 0.1])
    found, left_out = horizon.fit(terms, terms @ truth)
    assert found == pytest.approx(truth, abs=1e-9) and left_out < 1e-9
    noisy, left_out = horizon.fit(terms, terms @ truth - 0.3 * terms[:, 2])
    assert noisy.min() >= 0.0 and left_out > 0.01


@pytest.mark.parametrize("by_gemm", [False, True])
def test_the_best_plan_is_the_best_of_all(by_gemm: bool) -> None:
    generator = np.random.default_rng(2)
    flops = generator.uniform(0.5, 2.0, 4)
    statistics = horizon.Statistics(
        tuple(f"decoder.layers.{k}.mlp.linear_fc1" for k in range(4)),
        flops / flops.sum(),
        generator.uniform(0.0, 1.0, (4, 3, 4)),
    )
    coefficients = np.array([1.0, 0.2, 0.3, 0.1])
    costs, sizes = statistics.terms @ coefficients, np.repeat(statistics.flops[:, None] / 3, 3, 1)
    if not by_gemm:
        costs, sizes = costs.sum(1, keepdims=True), sizes.sum(1, keepdims=True)
    choices = (np.array(c) for c in itertools.product((0, 1), repeat=costs.size))
    allowed = [c for c in choices if c @ sizes.ravel() >= 0.75]
    best = min(allowed, key=lambda c: float(c @ costs.ravel()))
    gap, kept = horizon.best_plan(statistics, coefficients, 0.75, by_gemm)
    assert gap == pytest.approx(float(best @ costs.ravel()))
    gemms = [f":{gemm.value}" for gemm in Gemm] if by_gemm else [""]
    labels = [f"{layer}.fc1{gemm}" for layer in range(4) for gemm in gemms]
    assert kept == [label for label, low in zip(labels, best, strict=True) if not low]

"""Running means, and what a checkpoint and a file hold."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from megatron_snip.errors import UsageError
from megatron_snip.statistics.records import FORMAT_COLUMNS, StatisticsTable, running_mean
from tests.unit.divergence.build import errors, linear, table


def measured(size: float, iteration: int = 4) -> StatisticsTable:
    return replace(
        table(linear(0, fp4=errors(size)), linear(1, fp4=errors(2 * size))), iteration=iteration
    )


def test_sums_are_averaged_and_counts_are_the_last() -> None:
    first, second = measured(1.0), measured(3.0, iteration=9)
    mean = running_mean(running_mean(None, first, 0.75), second, 0.75)
    old, new = first.linears[1].formats["fp4"], second.linears[1].formats["fp4"]
    found = mean.linears[1].formats["fp4"]
    for name in FORMAT_COLUMNS:
        wanted = 0.75 * getattr(old, name) + 0.25 * getattr(new, name)
        assert getattr(found, name) == pytest.approx(wanted)
    assert (mean.iteration, mean.linears[0].tokens) == (9, second.linears[0].tokens)
    assert running_mean(first, second, 0.0) == second


def test_a_linear_that_was_not_observed_keeps_its_mean_and_a_new_format_starts_its_own() -> None:
    first = measured(1.0)
    unobserved = replace(linear(1, fp4=errors(0.0)), microbatches=0.0, tokens=0.0)
    observed = linear(0, fp4=errors(5.0), fp8=errors(0.5))
    mean = running_mean(first, table(observed, unobserved), 0.5)
    assert mean.linears[1] == first.linears[1]
    assert mean.linears[0].formats["fp4"].input_error_square == 0.5 * (1.0 + 25.0)
    assert mean.linears[0].formats["fp8"] == errors(0.5)
    never = table(unobserved, unobserved)
    assert running_mean(never, first, 0.9) == first
    # Frozen at a resume with other formats: it is no longer measured, nor was it in those.
    frozen = replace(linear(1, mxfp4=errors(0.0)), microbatches=0.0, tokens=0.0)
    assert running_mean(first, table(frozen), 0.5).linears == (frozen,)


def test_what_is_not_finite_is_gone_with_the_next_measurement() -> None:
    bad = table(linear(0, fp4=errors(1.0, input_error_square=math.nan, grad_error_square=math.inf)))
    good = table(linear(0, fp4=errors(1.0)))
    found = running_mean(good, bad, 0.5).linears[0].formats["fp4"]
    assert math.isnan(found.input_error_square) and found.grad_error_square == math.inf
    assert running_mean(running_mean(good, bad, 0.5), good, 0.5) == good


def test_it_goes_through_json_and_other_versions_are_refused() -> None:
    value = json.loads(json.dumps(measured(1.0).to_dict()))
    assert StatisticsTable.from_dict(value) == measured(1.0)
    for damage in ({"version": 1}, {"version": 4}, {"iteration": "x"}, {"linears": [{}]}):
        with pytest.raises(UsageError, match=next(iter(damage))) as caught:
            StatisticsTable.from_dict(value | damage)
        assert "\n" not in str(caught.value)


def test_of_version_2_the_errors_of_products_are_not_read_and_what_is_absent_is_nan() -> None:
    value = measured(1.0).to_dict() | {"version": 2}
    value["linears"][0]["output_square"] = 1.0
    value["linears"][0]["formats"]["fp4"]["fisher"] = 7.0
    assert StatisticsTable.from_dict(value) == measured(1.0)
    del value["linears"][0]["formats"]["fp4"]["input_error_square"]
    (first, _) = StatisticsTable.from_dict(value).linears
    assert math.isnan(first.formats["fp4"].input_error_square)

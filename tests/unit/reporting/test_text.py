"""Numbers and lists as people read them."""

import math

from megatron_snip.reporting.text import SOLVER_NOISE, column, number, percent, quality, seconds


def test_numbers() -> None:
    assert number(1.23456) == "1.235" and number(math.inf) == "-" and percent(0.6111) == "61.1%"
    assert quality(-3.79e-14) == "0" and quality(0.5) == "0.5"
    durations = (None, 0.004, 0.5, 12.34, 250.0, 12000.0)
    assert [*map(seconds, durations)] == [
        *("-", "4 ms", "500 ms", "12.3 s", "4 min 10 s", "3 h 20 min")
    ]


def test_a_column_has_one_number_of_decimals() -> None:
    assert column([12.5, None, 0.0, 3.79e-14], SOLVER_NOISE) == ["12.50", "-", "0.00", "0.00"]
    assert column([0.5, 1e-5, 0.0]) == ["5.00e-01", "1.00e-05", "0.00e+00"]
    assert column([1e-12, math.inf]) == ["1.00e-12", "-"]
    assert column([54321.0, 1.0]) == ["54321", "1"] and column([0.0]) == ["0.000"]

"""Numbers and lists as people read them."""

import math

from megatron_snip.reporting.text import (
    number,
    percent,
    quality,
    seconds,
)


def test_numbers() -> None:
    assert number(1.23456) == "1.235" and number(math.inf) == "-" and percent(0.6111) == "61.1%"
    assert quality(-3.79e-14) == "0" and quality(0.5) == "0.5"
    durations = (None, 0.004, 0.5, 12.34, 250.0, 12000.0)
    assert [*map(seconds, durations)] == [
        *("-", "4 ms", "500 ms", "12.3 s", "4 min 10 s", "3 h 20 min"),
    ]

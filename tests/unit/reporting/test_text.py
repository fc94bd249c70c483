"""Numbers and lists as people read them."""

import math

import pytest

from megatron_snip.options import Option
from megatron_snip.reporting.text import (
    label,
    listing,
    number,
    option_counts,
    percent,
    printable,
    quality,
    seconds,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (math.nan, "-"),
        (0.004, "4 ms"),
        (0.5, "500 ms"),
        (12.34, "12.3 s"),
        (250.0, "4 min 10 s"),
        (12000.0, "3 h 20 min"),
    ],
)
def test_seconds(value: float | None, text: str) -> None:
    assert seconds(value) == text


def test_numbers() -> None:
    assert number(1.23456) == "1.235" and number(math.inf) == "-" and number(None) == "-"
    assert percent(0.75) == "75%" and percent(0.6111) == "61.1%" and percent(None) == "-"
    assert quality(3.79e-14) == "0" and quality(-3.79e-14) == "0" and quality(0.5) == "0.5"


def test_lists_and_names() -> None:
    assert listing("abcdefgh") == "a, b, c, d, e, f and 2 more" and listing("ab") == "a, b"
    assert label("short") == "short" and label("a" * 20 + "b" * 20) == f"{'a' * 11}..{'b' * 11}"
    options = [Option.uniform(name) for name in ("fp4", "fp8", "fp4")]
    assert option_counts(dict(zip("abc", options, strict=True))) == "2 fp4, 1 fp8"


def test_control_characters_are_escaped() -> None:
    assert printable("a\x1b[2J\u202e\n") == "a\\x1b[2J\\u202e\\n"
    assert printable("plain [text]") == "plain [text]"

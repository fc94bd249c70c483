"""Numbers as people read them."""

import math

import pytest

from megatron_snip.options import Option
from megatron_snip.reporting.report.words import (
    choices,
    joined,
    listing,
    number,
    percent,
    plural,
    printable,
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


def test_numbers_and_shares() -> None:
    assert number(1.23456) == "1.235" and number(math.inf) == "-" and number(None) == "-"
    assert percent(0.75) == "75%" and percent(0.6111) == "61.1%" and percent(None) == "-"


def test_lists() -> None:
    assert listing("abcdefgh") == "a, b, c, d, e, f and 2 more"
    assert listing("ab") == "a, b"
    assert joined(["a"]) == "a" and joined(["a", "b", "c"]) == "a, b and c"
    assert plural(1, "plan") == "1 plan" and plural(2, "plan") == "2 plans"


def test_choices_are_counted() -> None:
    linears = {"a": Option.uniform("fp4"), "b": Option.uniform("fp8"), "c": Option.uniform("fp4")}
    assert choices(linears) == "2 fp4, 1 fp8"


def test_what_a_terminal_would_obey_is_written_out() -> None:
    assert printable("a\x1b[2J\u202e\n") == "a\\x1b[2J\\u202e\\n"
    assert printable("plain [text]") == "plain [text]"

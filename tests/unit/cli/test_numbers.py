"""Whole numbers from flags."""

from __future__ import annotations

import pytest

from megatron_snip.cli.numbers import LARGEST, whole_number
from megatron_snip.errors import UsageError


def test_digits_are_numbers() -> None:
    assert whole_number("--x", " 12 ") == 12
    assert whole_number("--x", "0", least=0) == 0
    assert whole_number("--x", str(LARGEST)) == LARGEST


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "1_0", "\u00b2", "\u0663", "0x1", "nan"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--x must be a whole number of at least 1"):
        whole_number("--x", text)


@pytest.mark.parametrize("text", ["0", str(LARGEST + 1), "9" * 5000])
def test_what_is_out_of_range_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=f"--x must be from 1 to {LARGEST}"):
        whole_number("--x", text)

"""`megatron-snip compare`: the tables as a terminal shows them."""

from __future__ import annotations

import pytest

from megatron_snip.cli.compare import _show
from megatron_snip.comparison.spread import spread_of
from megatron_snip.comparison.table import Row, Table

HOSTILE = "[/foo]:ok:\x1b"


def test_names_of_contenders_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    some = spread_of([0.1, 0.2])
    row = Row(HOSTILE, 2, 0.75, some, some, 0.1, some, some, 1.0, 0, {"h100": 0.9})
    _show((Table("forks", "fp4", 0.75, (row,)),))
    text = capsys.readouterr().out
    assert "[/foo]:ok:\\x1b" in text and "\x1b" not in text
    assert "h100" in text

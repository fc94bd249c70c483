"""`megatron-snip compare`: the tables as a terminal shows them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_snip.__main__ import main
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


@pytest.mark.parametrize(
    ("formats", "said"),
    [
        (("bf16", "fp8"), "no seconds for 'fp4'"),
        (("fp8", "fp4"), "no seconds for 'bf16'"),
        ((), ""),
    ],
)
def test_a_calibration_that_cannot_serve_is_refused_before_any_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], formats: tuple[str, ...], said: str
) -> None:
    seconds = {name: {"fprop": 1.0, "dgrad": 1.0, "wgrad": 1.0} for name in formats}
    linear = {"names": "*", "out_features": 8, "in_features": 8, "seconds": seconds}
    table = {"version": 1, "machine": "m", "device": "cpu", "date": "d", "versions": {}}
    file = tmp_path / "seconds.json"
    if formats:
        file.write_text(json.dumps({**table, "tokens": 8, "linears": [linear]}))
    output = tmp_path / "out"
    command = ["compare", "--output", str(output), "--calibration", str(file)]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert (said or "seconds.json") in error and error.count("\n") == 1
    assert not output.exists()

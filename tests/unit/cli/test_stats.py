"""`megatron-snip stats`: table, JSON, and bad input."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from megatron_snip.__main__ import main
from megatron_snip.config import SnipConfig
from megatron_snip.divergence.quality_loss import (
    divergence_table,
    divergences_dict,
)
from tests.unit.divergence.build import linear, table
from tests.unit.reporting.runs import Shape, config, write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with refreshes at iterations 10 and 30, as the package itself writes them."""
    config = SnipConfig(formats=("fp8", "fp4"))
    statistics = table(linear(0), linear(1))
    found = divergence_table(statistics, config.options, "fp4", config)
    folder = tmp_path / "run" / "divergences"
    folder.mkdir(parents=True)
    for iteration in (10, 30):
        value = divergences_dict(found, statistics)
        text = json.dumps({**value, "iteration": iteration})
        (folder / f"{iteration}.json").write_text(text)
    return tmp_path / "run"


def test_the_last_refresh_is_a_table_of_100_columns_and_nothing_is_written(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(run.rglob("*"))
    assert main(["stats", str(run)]) == 0
    text = capsys.readouterr().out
    assert "iteration 30, loss 2.5" in text and "decoder.layers.0.mlp.linear_fc2" in text
    assert "scores that order the linears" in text  # the heads are explained
    assert max(map(len, text.splitlines())) <= 100
    assert sorted(run.rglob("*")) == before


def test_iteration_and_order_can_be_chosen(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", str(run), "--iteration", "10", "--sort", "loss"]) == 0
    text = capsys.readouterr().out
    rows = [line.split() for line in text.splitlines() if "decoder" in line]
    assert "iteration 10" in text and sorted(row[1] for row in rows) == ["fp4"] * 2 + ["fp8"] * 2
    found = [float(row[2]) for row in rows]
    assert found == sorted(found, reverse=True)


def test_json_is_the_file_and_nothing_else(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", str(run), "--iteration", "10", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((run / "divergences" / "10.json").read_text())


def test_health_has_the_worst_first_in_100_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", Shape(config(), layers=5))
    assert main(["stats", str(run), "--health"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100 and "iteration 19" in text
    sqnr = text.partition("sqnr_db")[2].partition("underflow")[0]
    rows = [line.split() for line in sqnr.splitlines() if "decoder" in line]
    assert [float(row[-1]) for row in rows] == [11.0 + k // 2 for k in range(10)]
    assert main(["stats", str(run), "--health", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((run / "health/19.json").read_text())
    assert main(["stats", str(run), "--csv"]) == 0
    first, *lines = csv.reader(capsys.readouterr().out.splitlines())
    assert first == ["measure", "linear", "tensor", "format", "value"]
    assert len([line for line in lines if line[0] == "sqnr_db"]) == 20 * len(config().named_formats)
    (run / "health/19.json").write_text('{"version": 9}')
    assert main(["stats", str(run), "--health"]) == 2
    assert "version 9; this megatron-snip reads version 1" in capsys.readouterr().err


def test_names_are_printed_as_they_are(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "divergences" / "30.json"
    value = json.loads(path.read_text())
    value["linears"][0]["name"] = "decoder.layers.0.[/foo] :smile: \x1b[2J"
    path.write_text(json.dumps(value))
    assert main(["stats", str(run)]) == 0
    text = capsys.readouterr().out
    assert "decoder.layers.0.[/foo] :smile: \\x1b[2J" in text and "\x1b" not in text


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["RUN", "--iteration", "20"], "no refresh at 20 in"),
        (["RUN", "--iteration", "x"], "--iteration: must be an integer from 1"),
        (["RUN/divergences"], "no statistics"),
        (["RUN", "--iteration", "7"], "7.json': version 1"),
        (["RUN", "--iteration", "8"], "options.fp4.rel_error: must be a valid number, got 'inf'"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    run: Path, capsys: pytest.CaptureFixture[str], words: list[str], complaint: str
) -> None:
    (run / "divergences" / "7.json").write_text('{"version": 1}')
    linear = {"name": "a", "options": {"fp4": {"rel_error": "inf"}}}
    table = {"version": 2, "iteration": 8, "linears": [linear]}
    (run / "divergences" / "8.json").write_text(json.dumps(table))
    assert main(["stats", *(word.replace("RUN", str(run)) for word in words)]) == 2
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1

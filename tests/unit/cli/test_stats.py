"""`megatron-snip stats`: the table, the CSV, the JSON, and what is refused."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from megatron_snip.__main__ import main
from megatron_snip.cli.stats import FIELDS
from megatron_snip.config import SnipConfig
from megatron_snip.divergence.quality import QualitySettings, divergence_table, divergences_dict
from tests.unit.divergence.build import linear, table


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with refreshes at steps 10 and 30, as the package itself writes them."""
    config = SnipConfig(formats=("fp8", "fp4"))
    settings = QualitySettings(config.options, "fp4", "fisher", 0.1)
    statistics = table(linear(0), linear(1))
    folder = tmp_path / "run" / "divergences"
    folder.mkdir(parents=True)
    for step in (10, 30):
        value = divergences_dict(divergence_table(statistics, settings), statistics)
        (folder / f"{step}.json").write_text(json.dumps({**value, "step": step}))
    return tmp_path / "run"


def test_the_last_refresh_is_printed_and_saved(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["stats", str(run)]) == 0
    out = capsys.readouterr().out
    assert "step 30, loss 2.5000" in out
    assert "decoder.layers.0.mlp.linear_fc2" in out
    rows = list(csv.DictReader((run / "statistics" / "30.csv").open()))
    assert [row["option"] for row in rows] == ["fp8", "fp4"] * 2
    assert set(rows[0]) == {"linear", "stage", "option", *FIELDS}
    fp4 = rows[1]
    assert float(fp4["loss_divergence"]) == pytest.approx(float(fp4["fisher"]))


def test_a_step_an_order_and_a_file_may_be_asked_for(run: Path, tmp_path: Path) -> None:
    output = tmp_path / "out" / "fp4.csv"
    words = ["stats", str(run), "--step", "10", "--sort", "fisher", "--output", str(output)]
    assert main(words) == 0
    found = [float(row["fisher"]) for row in csv.DictReader(output.open())]
    assert found == sorted(found, reverse=True)
    assert not (run / "statistics").exists()


def test_json_is_the_file_and_nothing_else(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", str(run), "--step", "10", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((run / "divergences" / "10.json").read_text())
    assert not (run / "statistics").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--step", "20"], "no refresh at step 20"),
        (["--output", "/proc/nowhere/x.csv"], "cannot write"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    run: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["stats", str(run), *words]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


def test_names_are_printed_as_they_are(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "divergences" / "30.json"
    value = json.loads(path.read_text())
    value["linears"][0]["name"] = name = "decoder.layers.0.[/foo] :smile: \x1b[2J"
    path.write_text(json.dumps(value))
    assert main(["stats", str(run), "--output", str(run / "[bold]x.csv")]) == 0
    text = capsys.readouterr().out
    assert "decoder.layers.0.[/foo] :smile: \\x1b[2J" in text and "\x1b" not in text
    assert "[bold]x.csv" in text
    rows = list(csv.DictReader((run / "[bold]x.csv").open()))
    assert rows[0]["linear"] == name  # the file holds what was measured


def test_a_run_without_refreshes_and_a_damaged_file_are_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["stats", str(tmp_path)]) == 2
    assert "no statistics" in capsys.readouterr().err
    (run / "divergences" / "30.json").write_text('{"version": 1}')
    assert main(["stats", str(run)]) == 2
    assert "damaged" in capsys.readouterr().err

"""`megatron-snip compare`: the tables as a terminal shows them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_snip.__main__ import main
from megatron_snip.cli import compare
from megatron_snip.cli.compare import _show
from megatron_snip.comparison.schedule import make_schedule
from megatron_snip.comparison.spread import spread_of
from megatron_snip.comparison.table import Row, Table
from tests.unit.comparison import build

CONFIG = build.comparison(policies=("bf16", "snip-linear"), seeds=1)
HOSTILE = "[/foo]:ok:\x1b"


def test_names_of_contenders_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    some = spread_of([0.1, 0.2])
    row = Row(HOSTILE, 2, 0.75, some, some, 0.1, some, some, 1.0, 0, {"h\x1b100": 0.9})
    _show((Table("forks", "fp4", 0.75, (row,)),))
    text = capsys.readouterr().out
    assert "[/foo]:ok:\\x1b" in text and "\x1b" not in text
    assert "h\\x1b100" in text


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


def test_names_are_not_cut(capsys: pytest.CaptureFixture[str]) -> None:
    some = spread_of([0.1, 0.2])
    times = {"Hopper": 0.9, "Blackwell": 0.8, "a chip of a rather long name": 0.7}
    names = ("snip-linear-aligned", "snip-linear-aligned-1")
    rows = tuple(Row(n, 2, 0.75, some, some, 0.1, some, some, 1.0, 0, times) for n in names)
    _show((Table("forks", "fp4", 0.75, rows),))
    lines = capsys.readouterr().out.splitlines()
    assert all(any(f" {name} " in line for line in lines) for name in names)


def finished(folder: Path) -> list[str]:
    """A comparison of which all but the directories of the runs is there."""
    file = folder / "compare.yaml"
    file.write_text(json.dumps({**CONFIG.model_dump(mode="json"), "output": str(folder / "out")}))
    (folder / "out" / "outcomes").mkdir(parents=True)
    for entry in make_schedule(CONFIG).entries:
        found = build.outcome(entry.run.key, 2.0 if entry.contender == "bf16" else 2.01)
        path = folder / "out" / "outcomes" / f"{entry.run.key}.json"
        path.write_text(json.dumps(found.to_json()))
    return ["compare", "--config", str(file), "--table"]


@pytest.mark.parametrize(
    ("missing", "png", "report"),
    [((), True, True), (("jinja2",), True, False), (("matplotlib", "jinja2"), False, False)],
)
def test_what_can_be_drawn_is_drawn_and_the_rest_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    missing: tuple[str, ...],
    png: bool,
    report: bool,
) -> None:
    monkeypatch.setattr(compare, "find_spec", lambda name: None if name in missing else name)
    command = finished(tmp_path)
    if report:
        (tmp_path / "out" / "report").mkdir()
        (tmp_path / "out" / "report" / "forks-old.png").touch()
    assert main(command) == 0
    printed = capsys.readouterr()
    output = tmp_path / "out"
    assert (output / "forks-fp3-75.png").exists() == png
    assert (output / "report" / "report.html").exists() == report
    assert not (output / "report" / "forks-old.png").exists()
    assert "+10.0" in printed.out
    assert ("pip install 'megatron-snip[report]'" in printed.err) == (not report)
    assert all(f"needs {' and '.join(missing)};" in printed.err for _ in missing)


def test_seconds_of_other_shapes_are_said_to_be_scaled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = finished(tmp_path)
    seconds = {n: {"fprop": 1.0, "dgrad": 1.0, "wgrad": 1.0} for n in ("bf16", "fp8", "fp3")}
    linear = {"names": "*", "out_features": 8, "in_features": 8, "seconds": seconds}
    table = {"version": 1, "machine": "m", "device": "Hopper", "date": "d", "versions": {}}
    file = tmp_path / "seconds.json"
    file.write_text(json.dumps({**table, "tokens": 8, "linears": [linear]}))
    assert main([*command, "--calibration", str(file)]) == 0
    printed = capsys.readouterr()
    assert printed.err.count("other shapes for '*'") == 1
    assert "Hopper, calibrated" in " ".join(printed.out.split())
    content = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert content["calibration"]["machine"] == "m" and "linears" not in content["calibration"]
    assert "calibration" not in content["settings"]


def test_a_report_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = finished(tmp_path)
    (tmp_path / "out" / "report").touch()
    assert main(command) == 2
    assert "cannot write" in capsys.readouterr().err


def test_an_interrupt_while_drawing_leaves_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "_show", interrupt)
    assert main(finished(tmp_path)) == compare.INTERRUPTED
    assert "interrupted" in capsys.readouterr().err


def test_formats_of_pins_are_asked_of_a_calibration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "compare.yaml"
    contender = {"policy": "snip", "pins": ["*fc1=mxfp8"]}
    settings = CONFIG.model_dump(mode="json") | {"output": str(tmp_path / "out")}
    settings |= {"contenders": {"pinned": contender}, "policies": ["bf16", "pinned"]}
    file.write_text(json.dumps(settings))
    seconds = {n: {"fprop": 1.0, "dgrad": 1.0, "wgrad": 1.0} for n in ("bf16", "fp8", "fp3")}
    linear = {"names": "*", "out_features": 8, "in_features": 8, "seconds": seconds}
    table = {"version": 1, "machine": "m", "device": "cpu", "date": "d", "versions": {}}
    calibration = tmp_path / "seconds.json"
    calibration.write_text(json.dumps({**table, "tokens": 8, "linears": [linear]}))
    assert main(["compare", "--config", str(file), "--calibration", str(calibration)]) == 2
    assert "no seconds for 'mxfp8'" in capsys.readouterr().err

"""Where the time went, by hand."""

import json
from pathlib import Path

import pytest

from megatron_snip.reporting.phases import phases_of
from megatron_snip.reporting.run_record import read_run
from tests.unit.reporting.runs import Shape, config, write_run


def test_seconds_add_up(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", Shape(config()))
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    text = "".join(json.dumps({**row, "wall_s": 1.0}) + "\n" for row in rows)
    (path / "metrics.jsonl").write_text(text)
    phases = phases_of(read_run(path))
    assert phases is not None
    assert phases.wall == pytest.approx(24.0)
    assert phases.refresh == pytest.approx(3 * 0.25)
    assert phases.wait == pytest.approx(3 * 0.002)
    assert phases.step == pytest.approx(24 - 0.75 - 0.006)
    assert phases.solve == pytest.approx(3 * 0.125)


def test_a_run_that_recorded_no_times_has_none(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", Shape(config(enabled=False), steps=2))
    (path / "metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\n')
    assert phases_of(read_run(path)) is None

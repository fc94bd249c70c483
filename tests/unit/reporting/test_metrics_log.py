"""metrics.jsonl as it grows, breaks, and goes back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_snip.errors import UsageError
from megatron_snip.reporting.metrics_log import EventMark, MetricsLog, PlanMark


def write(path: Path, *rows: dict[str, Any]) -> None:
    with path.open("a") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_only_whole_lines_count(path: Path) -> None:
    log = MetricsLog(path)
    assert not log.read_more() and log.last_step == -1  # the file need not exist
    path.write_text('{"step": 0, "loss": 2.0}\n{"step": 1, "lo')
    assert log.read_more() and log.last_step == 0
    assert not log.read_more()
    with path.open("a") as stream:
        stream.write('ss": 1.5}\n')
    assert log.read_more() and log.last("loss") == 1.5


def test_a_step_made_again_voids_what_was_written_after_it(path: Path) -> None:
    write(path, *({"step": step, "loss": float(step)} for step in range(6)))
    log = MetricsLog(path)
    log.read_more()
    write(path, {"step": 3, "loss": 30.0})
    log.read_more()
    assert log.column("loss")[0].tolist() == [0, 1, 2, 3]
    assert log.last("loss") == 30.0


def test_a_file_begun_anew_is_read_anew(path: Path) -> None:
    write(path, {"step": 0}, {"step": 1})
    log = MetricsLog(path)
    log.read_more()
    path.write_text('{"step": 0}\n')
    log.read_more()
    assert [row["step"] for row in log.rows] == [0]


def test_columns_plans_and_events(path: Path) -> None:
    event = {"kind": "kept", "message": "why"}
    write(
        path,
        {"step": 0, "loss": None},
        {"step": 4, "loss": 2.0, "plan_step": 2, "changed_linears": 3, "wait_s": 0.5},
        {"step": 5, "events": [event]},
    )
    log = MetricsLog(path)
    log.read_more()
    steps, losses = log.column("loss")
    assert steps.tolist() == [0, 4] and np.isnan(losses[0]) and losses[1] == 2.0
    assert log.plans == [PlanMark(4, 2, 3, 0.5)]
    assert log.events == [EventMark(5, "kept", "why")]
    assert log.last("validation_loss") is None


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"loss": 1.0}', "is not an object with a 'step'"),
        ('{"step": -1}', "is not an object with a 'step'"),
        ('{"step": true}', "is not an object with a 'step'"),
        ("[1]", "is not an object with a 'step'"),
        ('{"step": 1, "loss": "x"}', "'loss' is not a number"),
        ('{"step": 1, "wall_s": true}', "'wall_s' is not a number"),
        ('{"step": 1, "events": [{"kind": "kept"}]}', "'events' is not a list"),
        ('{"step": 1, "events": 5}', "'events' is not a list"),
        ('{"step": 1', "is not valid JSON"),
        ('{"step": 1, "loss": NaN}', "NaN"),
    ],
)
def test_a_bad_line_is_named_with_its_number(path: Path, line: str, complaint: str) -> None:
    path.write_text('{"step": 0}\n' + line + "\n")
    with pytest.raises(UsageError, match=r"line 2") as caught:
        MetricsLog(path).read_more()
    assert complaint in str(caught.value) and "\n" not in str(caught.value)


def test_bytes_that_are_no_text_are_refused(path: Path) -> None:
    path.write_bytes(b'{"step": 0, "a": "\xff"}\n')
    with pytest.raises(UsageError, match="line 1 is not UTF-8 text"):
        MetricsLog(path).read_more()

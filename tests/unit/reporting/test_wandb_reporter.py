"""The real W&B, offline, read back: what is logged, at which step, what a killed run keeps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
from PIL import Image

from megatron_snip.errors import UsageError
from megatron_snip.reporting.reporter import Event
from megatron_snip.reporting.wandb_reporter import FLUSH_INTERVAL_S, WandbReporter, _prompt
from tests.unit.reporting.runs import Shape, config, plan_from, refresh_at, tell
from tests.unit.reporting.wandb_runs import Written, inspect, isolate, read_back

wandb = pytest.importorskip("wandb")

FALLBACK = Event(7, "fallback", "the loss is NaN; back to fp8")
SHAPE = Shape(config(), steps=16, events=(FALLBACK,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    patch = pytest.MonkeyPatch()
    folder = tmp_path_factory.mktemp("wandb")
    isolate(patch, folder)
    yield folder
    wandb.teardown()
    patch.undo()


@pytest.fixture(scope="module")
def written(folder: Path) -> Written:
    """A run of 16 steps: refreshes at 2 and 10, plans at 4 and 12, a fallback at 7."""
    reporter = WandbReporter("a-project", folder, {"lr": 0.5, "snip": {"interval": 8}})
    tell(reporter, SHAPE)
    reporter.metrics(99, {"loss": 1.0})  # after the end: must not appear
    reporter.close()
    return read_back(folder)


def test_the_config_and_the_end_are_there(written: Written) -> None:
    assert written.config == {"lr": 0.5, "snip": {"interval": 8}}
    assert written.exit_code == 0


def test_every_step_has_its_scalars_and_nothing_comes_after_the_end(written: Written) -> None:
    assert sorted(written.rows) == list(range(16))
    for step, row in written.rows.items():
        assert row["snip/training/loss"] > 0
        assert row["snip/linears/lowest_precision_fraction"] == (0.0 if step < 4 else 11 / 18)
    assert written.rows[12]["snip/planning/objective"] == pytest.approx(
        plan_from(SHAPE, refresh_at(SHAPE, 10)).objective
    )
    measured = {step: row["snip/statistics/refresh_s"] for step, row in written.rows.items()}
    assert [step for step, seconds in measured.items() if seconds > 0] == [2, 10]


def test_each_changed_plan_is_a_table_a_picture_and_an_artifact(written: Written) -> None:
    assert written.steps_with("snip/planning/plan") == [4, 12]
    assert written.steps_with("snip/planning/plan_map") == [4, 12]
    table = json.loads(written.media("snip/planning/plan", 12).read_text())
    plan = plan_from(SHAPE, refresh_at(SHAPE, 10))
    assert table["columns"] == ["linear", "fprop", "dgrad", "wgrad"]
    assert table["data"] == [[name, *o.formats] for name, o in plan.linears.items()]
    names = [name for name, kind in written.artifacts if kind == "snip-plan"]
    assert len(names) == 2 and len(set(names)) == 1  # versions of one artifact


def test_each_refresh_is_heat_maps_and_histograms(written: Written) -> None:
    assert written.steps_with("snip/divergence/maps") == [2, 10]
    for name in ("loss_log10", "weight_log10"):
        assert written.steps_with(f"snip/divergence/{name}") == [2, 10]
    for key, step in (("snip/divergence/maps", 10), ("snip/planning/plan_map", 12)):
        with Image.open(written.media(key, step)) as image:
            assert len(image.convert("RGB").getcolors(1 << 24) or []) > 20
            assert image.convert("RGB").getpixel((0, 0)) == (255, 255, 255)


def test_an_event_is_an_alert_and_counted(written: Written) -> None:
    assert written.alerts == [("SNIP: fallback at step 7", FALLBACK.message)]
    assert [written.rows[step]["snip/controller/num_fallbacks"] for step in (6, 7, 15)] == [0, 1, 1]


def test_a_resumed_run_logs_at_its_own_steps_and_a_crash_is_a_failure(
    folder: Path, tmp_path: Path
) -> None:
    try:
        reporter = WandbReporter("p", tmp_path, {})
        tell(reporter, SHAPE, first=9, close=False)
        raise ValueError("training crashed")
    except ValueError:
        reporter.close()
    resumed = read_back(tmp_path)
    assert sorted(resumed.rows) == list(range(9, 16))
    assert resumed.exit_code == 1


def test_a_killed_run_keeps_what_was_told_half_a_second_before(tmp_path: Path) -> None:
    script = (
        "import os, signal, time; from pathlib import Path\n"
        "from megatron_snip.reporting.wandb_reporter import WandbReporter\n"
        f"reporter = WandbReporter('p', Path({str(tmp_path)!r}), {{'a': 1}})\n"
        "for step in range(5): reporter.metrics(step, {'loss': 2.0})\n"
        f"log = next(Path({str(tmp_path)!r}).glob('wandb/offline-run-*/run-*.wandb'))\n"
        "deadline = time.monotonic() + 60\n"
        "while b'snip/training/loss' not in log.read_bytes() and time.monotonic() < deadline:\n"
        "    time.sleep(0.05)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    patch = pytest.MonkeyPatch()
    isolate(patch, tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    patch.undo()
    done = subprocess.run([sys.executable, "-c", script], env=environment, check=False, timeout=120)
    assert done.returncode == -signal.SIGKILL
    (log,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    records = [json.loads(line) for line in inspect(log, "--json").splitlines()]
    assert any(record["type"] == "history" for record in records)
    assert not any(record["type"] == "exit" for record in records)


def test_an_unknown_mode_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WANDB_MODE", "on")
    with pytest.raises(UsageError, match="WANDB_MODE is 'on'; expected one of online, offline"):
        WandbReporter("p", tmp_path, {})


def test_releases_that_do_not_know_how_to_flush_often_are_not_asked_to() -> None:
    """W&B refuses settings that it does not know; 0.19 to 0.30 do not know this one."""

    class Old:
        model_fields: ClassVar = {"silent": None}

    assert _prompt(SimpleNamespace(Settings=Old)) == {}
    assert _prompt(SimpleNamespace(Settings=type("Ancient", (), {}))) == {}
    known = _prompt(wandb)
    assert known == {"x_transaction_log_flush_interval": FLUSH_INTERVAL_S}
    assert wandb.Settings(**known).x_transaction_log_flush_interval == FLUSH_INTERVAL_S


def test_without_the_package_the_remedy_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match=r"pip install 'megatron-snip\[wandb\]'"):
        WandbReporter("p", tmp_path, {})

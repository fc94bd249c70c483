"""Bridge's own W&B run and TensorBoard writer, on the last rank."""

import time
from pathlib import Path

import pytest

from tests.bridge.lab import SNIP, Lab, weights


@pytest.fixture(scope="module")
def written(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two pipeline stages with both writers."""
    folder = tmp_path_factory.mktemp("loggers")
    overrides = [
        f"logger.tensorboard_dir={folder / 'tensorboard'}",
        *["logger.wandb_project=tiny", "logger.wandb_exp_name=writers"],
        f"logger.wandb_save_dir={folder}",
    ]
    environment = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    run = lab.run("llama-pp2", [*SNIP, *overrides], environment)
    assert weights(run) == weights(lab.run("llama-pp2", SNIP))
    return folder


def test_tensorboard_shows_snip_beside_bridge(written: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(written / "tensorboard"))
    events.Reload()
    scalars = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    assert "lm loss" in scalars
    changed = {e.step: e.value for e in scalars["snip/refresh/changed_linears"]}
    assert next(step for step, value in changed.items() if value > 0) == 5
    refreshes = {e.step: e.value for e in scalars["snip/refresh/measure_s"]}
    assert [step for step, value in refreshes.items() if value > 0] == [3, 7]
    fractions = {e.step: e.value for e in scalars["snip/3_lowest_precision_share"]}
    assert fractions[4] == 0.0 and fractions[5] >= 0.5


def test_wandb_has_one_run_that_shows_both(written: Path) -> None:
    """W&B's file, which a process of its own writes, holds the keys of its rows as they are."""
    pytest.importorskip("wandb")
    (file,) = written.rglob("*.wandb")
    keys = {b"lm loss", b"snip/2_quality_loss_share", b"snip/refresh/measure_s"}
    end = time.monotonic() + 120
    while (missing := {key for key in keys if key not in file.read_bytes()}) and (
        time.monotonic() < end
    ):
        time.sleep(0.5)
    assert not missing

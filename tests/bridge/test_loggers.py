"""Bridge's own loggers, on the last rank: W&B, TensorBoard, MLflow and Comet."""

import json
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


def test_mlflow_and_comet_have_what_wandb_has(lab: Lab, tmp_path: Path) -> None:
    """Through the objects that Bridge makes; their packages are stand-ins."""
    overrides = [
        *["logger.mlflow_experiment=tiny", "logger.mlflow_run_name=writers"],
        *["logger.comet_project=tiny", "logger.comet_experiment_name=writers"],
    ]
    run = lab.run("llama-pp2", [*SNIP, *overrides], {"TINY_TRACKERS": str(tmp_path)})
    assert weights(run) == weights(lab.run("llama-pp2", SNIP))
    (mlflow,) = json.loads((tmp_path / "mlflow.json").read_text()).values()
    comet = json.loads((tmp_path / "comet.json").read_text())
    for metrics in (mlflow["metrics"], comet["metrics"]):
        assert "lm loss" in metrics
        changed = metrics["snip/refresh/changed_linears"]
        assert next(int(step) for step, value in changed.items() if value > 0) == 5
        assert list(metrics["snip/refresh/measure_s"]) == ["3", "7"]
        shares = metrics["snip/3_lowest_precision_share"]
        assert shares["4"] == 0.0 and shares["5"] >= 0.5
    assert mlflow["tags"]["snip.interval"] == "4" and comet["parameters"]["snip_interval"] == 4
    for files in (mlflow["files"], comet["files"]):
        assert {"snip/plans/3.json", "snip/precision/5.json"} <= files.keys()

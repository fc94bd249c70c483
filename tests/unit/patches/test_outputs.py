"""Where a Megatron job's results go, and which rank reports what."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_snip.collectives import RemoteFailure
from megatron_snip.config import SnipConfig
from megatron_snip.patches.outputs import make_reporter, output_directory
from megatron_snip.topology import Topology
from tests.unit.patches.fake_megatron import FakeMegatron


def test_the_directory(tmp_path: Path) -> None:
    assert output_directory(SnipConfig(), None) == Path("snip")
    assert output_directory(SnipConfig(), "/checkpoints") == Path("/checkpoints/snip")
    chosen = SnipConfig(output_dir=tmp_path)
    assert output_directory(chosen, "/checkpoints") == tmp_path


def arguments(save: Path) -> argparse.Namespace:
    return argparse.Namespace(
        save=str(save), lr=0.1, exit_signal=signal.SIGTERM, functions=[print], num_layers=None
    )


def test_rank_0_writes_what_was_asked_for(fake: FakeMegatron, tmp_path: Path) -> None:
    reporter = make_reporter(SnipConfig(interval=50), arguments(tmp_path), Topology())
    assert reporter is not None
    reporter.metrics(3, {"loss": 1.0})
    reporter.close()
    config = yaml.safe_load((tmp_path / "snip" / "config.yaml").read_text())
    assert config["snip"]["interval"] == 50
    assert config["megatron"] == {"lr": 0.1, "num_layers": None, "save": str(tmp_path)}
    assert '"step": 3' in (tmp_path / "snip" / "metrics.jsonl").read_text()


def test_the_last_rank_has_megatrons_writers(
    fake: FakeMegatron, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[Any] = []

    class Writer:
        def add_scalar(self, name: str, value: float, iteration: int) -> None:
            rows.append((name, value, iteration))

    # One rank of several without a group for collectives: only its own part is looked at.
    last = Topology(rank=1, world_size=2)
    assert make_reporter(SnipConfig(), arguments(tmp_path), last) is None
    monkeypatch.setattr(fake.global_vars, "get_tensorboard_writer", Writer)
    reporter = make_reporter(SnipConfig(), arguments(tmp_path), last)
    assert reporter is not None
    reporter.metrics(3, {"lowest_precision_fraction": 0.5, "loss": 1.0})
    assert ("snip/linears/lowest_precision_fraction", 0.5, 4) in rows
    assert not any("loss" in name.split("/")[-1] for name, *_ in rows)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_said_to_all(fake: FakeMegatron, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = SnipConfig(output_dir=tmp_path / "file" / "below")
    with pytest.raises(RemoteFailure, match="opening --snip-output-dir"):
        make_reporter(config, arguments(tmp_path), Topology())

"""SNIP's state in Megatron's checkpoints, and the sidecar."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_snip.errors import UsageError
from megatron_snip.patches import checkpoint
from megatron_snip.patches.registry import Registry, Session
from tests.unit.patches.fake_megatron import FakeController, FakeMegatron

PATCHES = (checkpoint.save, checkpoint.load, checkpoint.sidecar)
STATE = {"version": 2, "iteration": 3}


@pytest.fixture
def session(fake: FakeMegatron) -> Session:
    registry = Registry(PATCHES)
    registry.install({"--snip"})
    return registry.session


def attach(session: Session) -> None:
    session.controller = FakeController()  # type: ignore[assignment]


@pytest.mark.parametrize("ckpt_format", ["torch_dist", "torch"])
def test_the_state_is_saved_under_one_key(
    fake: FakeMegatron, session: Session, ckpt_format: str
) -> None:
    attach(session)
    args = argparse.Namespace(ckpt_format=ckpt_format)
    saved = fake.checkpointing.generate_state_dict(args, "model", iteration=3)
    assert saved == {"model": "model", "snip": STATE}


def test_a_failure_does_not_cost_the_checkpoint(
    fake: FakeMegatron, session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    attach(session)

    def state(iteration: int) -> None:
        raise RuntimeError("a bug")

    session.controller.state = state  # type: ignore[union-attr,assignment]
    args = argparse.Namespace(ckpt_format="torch_dist")
    assert fake.checkpointing.generate_state_dict(args, "model", 3) == {"model": "model"}
    assert "checkpoint of iteration 3 has no SNIP state: RuntimeError: a bug" in caplog.text


def test_a_template_for_loading_has_no_state(fake: FakeMegatron, session: Session) -> None:
    attach(session)
    args = argparse.Namespace(ckpt_format="torch_dist")
    assert fake.checkpointing.generate_state_dict(args, "model") == {"model": "model"}


def test_other_formats_do_not_carry_the_state(fake: FakeMegatron, session: Session) -> None:
    attach(session)
    args = argparse.Namespace(ckpt_format="torch_dcp")
    assert fake.checkpointing.generate_state_dict(args, "model", 3) == {"model": "model"}


def test_converting_a_checkpoint_keeps_what_was_loaded(
    fake: FakeMegatron, session: Session
) -> None:
    args = argparse.Namespace(ckpt_format="torch")
    assert "snip" not in fake.checkpointing.generate_state_dict(args, "model", 3)
    session.loaded = dict(STATE)
    assert fake.checkpointing.generate_state_dict(args, "model", 3)["snip"] == STATE


def load(fake: FakeMegatron, rank0: bool = False, finetune: bool = False) -> Any:
    args = argparse.Namespace(finetune=finetune)
    return fake.checkpointing._load_base_checkpoint("/nowhere", args, rank0=rank0)


def test_the_last_reading_gives_the_state(fake: FakeMegatron, session: Session) -> None:
    fake.loaded = {"iteration": 3, "snip": STATE}
    result = load(fake, rank0=True)
    assert result == (fake.loaded, "/nowhere", False, "global")
    assert session.loaded is None
    load(fake)
    assert session.loaded == STATE


@pytest.mark.parametrize("why", ["finetune", "release", "nothing", "without"])
def test_a_new_run_ignores_it(fake: FakeMegatron, session: Session, why: str) -> None:
    session.loaded = {"iteration": 1}
    fake.loaded = {"iteration": 3, "snip": STATE}
    if why == "nothing":
        fake.loaded = None
    if why == "without":
        fake.loaded = {"iteration": 3}
    fake.release = why == "release"
    load(fake, finetune=why == "finetune")
    assert session.loaded is None


def test_other_formats_have_a_sidecar(fake: FakeMegatron, session: Session, tmp_path: Path) -> None:
    attach(session)
    folder = tmp_path / "iter_0000003"
    folder.mkdir()
    fake.args.save, fake.args.ckpt_format = str(tmp_path), "torch_dcp"
    assert fake.training.save_checkpoint_and_time(3, "model") == "saved 3"
    assert json.loads((folder / checkpoint.SIDECAR).read_text()) == STATE
    fake.loaded = {"iteration": 3}
    args = argparse.Namespace(finetune=False)
    fake.checkpointing._load_base_checkpoint(folder, args)
    assert session.loaded == STATE


@pytest.mark.parametrize("why", ["carried", "other rank", "local"])
def test_no_sidecar_where_none_is_needed(
    fake: FakeMegatron, session: Session, tmp_path: Path, why: str
) -> None:
    attach(session)
    (tmp_path / "iter_0000003").mkdir()
    fake.args.save = str(tmp_path)
    fake.args.ckpt_format = "torch_dist" if why == "carried" else "torch_dcp"
    fake.args.rank = 1 if why == "other rank" else 0
    fake.training.save_checkpoint_and_time(3, "model", non_persistent_ckpt=why == "local")
    assert list(tmp_path.rglob("*.json")) == []


def test_a_sidecar_is_strict_json(tmp_path: Path) -> None:
    checkpoint.write_sidecar(tmp_path, {"metrics": [float("nan"), 1.0], "n": None})
    assert checkpoint.read_sidecar(tmp_path) == {"metrics": [None, 1.0], "n": None}
    assert checkpoint.read_sidecar(tmp_path / "other") is None
    (tmp_path / checkpoint.SIDECAR).write_text("[1]")
    with pytest.raises(UsageError, match="must hold a JSON object"):
        checkpoint.read_sidecar(tmp_path)


def test_a_sidecar_that_cannot_be_written_does_not_end_training(
    fake: FakeMegatron, session: Session, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    attach(session)
    fake.args.save, fake.args.ckpt_format = str(tmp_path / "none"), "torch_dcp"
    assert fake.training.save_checkpoint_and_time(3, "model") == "saved 3"
    assert "checkpoint of iteration 3 has no SNIP state" in caplog.text

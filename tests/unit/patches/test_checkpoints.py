"""SNIP's state in Megatron's checkpoints."""

import argparse
from typing import Any

import pytest

from megatron_snip.patches import checkpoint
from megatron_snip.patches.registry import Registry, Session
from tests.unit.patches.fake_megatron import FakeController, FakeMegatron

PATCHES = (checkpoint.save, checkpoint.load)
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

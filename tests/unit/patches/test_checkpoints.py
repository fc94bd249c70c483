"""SNIP's state in Megatron's checkpoints."""

from argparse import Namespace
from typing import Any
from unittest.mock import Mock

import pytest

from megatron_snip.patches import checkpoint
from megatron_snip.patches.registry import Registry, Session
from tests.unit.patches.fake_megatron import FakeMegatron

STATE = {"version": 2, "iteration": 3}


@pytest.fixture
def session(fake: FakeMegatron) -> Session:
    registry = Registry((checkpoint.save, checkpoint.load))
    registry.install({"--snip"})
    return registry.session


def save(fake: FakeMegatron, ckpt_format: str = "torch_dist") -> Any:
    args = Namespace(ckpt_format=ckpt_format)
    return fake.checkpointing.generate_state_dict(args, "model", iteration=3)


def load(fake: FakeMegatron, rank0: bool = False, finetune: bool = False) -> Any:
    args = Namespace(finetune=finetune)
    return fake.checkpointing._load_base_checkpoint("/nowhere", args, rank0=rank0)


@pytest.mark.parametrize("ckpt_format", ["torch_dist", "torch"])
def test_the_state_is_saved_under_one_key(
    fake: FakeMegatron, session: Session, ckpt_format: str
) -> None:
    session.controller = Mock()
    session.controller.state().to_dict.return_value = STATE
    assert save(fake, ckpt_format) == {"model": "model", "snip": STATE}
    session.controller.state.assert_called_with(3)


def test_a_failure_does_not_cost_the_checkpoint(
    fake: FakeMegatron, session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    session.controller = Mock(state=Mock(side_effect=RuntimeError("a bug")))
    assert save(fake) == {"model": "model"}
    assert "checkpoint of iteration 3 has no SNIP state: RuntimeError: a bug" in caplog.text


def test_converting_a_checkpoint_keeps_what_was_loaded(
    fake: FakeMegatron, session: Session
) -> None:
    assert "snip" not in save(fake)
    session.loaded = dict(STATE)
    assert save(fake)["snip"] == STATE


def test_the_last_reading_gives_the_state(fake: FakeMegatron, session: Session) -> None:
    fake.loaded = {"iteration": 3, "snip": STATE}
    assert load(fake, rank0=True) == (fake.loaded, "/nowhere", False, "global")
    assert session.loaded is None
    load(fake)
    assert session.loaded == STATE


@pytest.mark.parametrize("why", ["finetune", "release", "nothing", "without"])
def test_a_new_run_ignores_it(fake: FakeMegatron, session: Session, why: str) -> None:
    session.loaded = {"iteration": 1}
    found = {"iteration": 3, "snip": STATE}
    fake.loaded = {"nothing": None, "without": {"iteration": 3}}.get(why, found)
    fake.release = why == "release"
    load(fake, finetune=why == "finetune")
    assert session.loaded is None

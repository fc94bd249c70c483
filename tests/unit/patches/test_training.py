"""A training iteration and SNIP's state in checkpoints; Megatron's values pass through."""

import math
from argparse import Namespace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch
from megatron.core import num_microbatches_calculator

from megatron_snip.patches import megatron_lm
from megatron_snip.patches.graphs import Graphs
from megatron_snip.patches.registry import Registry, Session
from megatron_snip.patches.step import StepMetrics
from megatron_snip.topology import Topology

STEP_PATCHES = (megatron_lm.train_step, megatron_lm.report_step, megatron_lm.evaluate)
ARGUMENTS = ("step_func", "data", "model", "optimizer", "scheduler", "config")
OPTIMIZER = SimpleNamespace(param_groups=[{"lr": 0.1}, {"lr": 0.3}, {"lr": None}])


def schedule(**kwargs: Any) -> torch.Tensor:
    assert sorted(kwargs) == ["data_iterator", "model"]
    return torch.tensor(2.0)


@pytest.fixture
def controller(fake: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(num_microbatches_calculator, "get_current_global_batch_size", lambda: 4)
    registry = Registry(STEP_PATCHES)
    registry.install({"--snip"})
    controller = MagicMock()
    controller.evaluations.next_name.return_value = "validation"
    controller.evaluations.iteration_is_open = True
    registry.session.metrics = StepMetrics(Topology())
    registry.session.controller = controller
    registry.session.graphs = Graphs(MagicMock())
    controller.forward_backward.side_effect = lambda iteration, function, **given: function(**given)
    return controller


def end_step(fake: Any, iteration: int) -> Any:
    return fake.training.post_training_step_callbacks(
        "model", OPTIMIZER, "scheduler", iteration, None, 41.0
    )


def test_an_iteration_runs_through_the_controller(fake: Any, controller: Any) -> None:
    result = fake.training.train_step(*ARGUMENTS, schedule, iteration=7)
    assert result == ({"lm loss": torch.tensor(2.0)}, 0, False, False, 0, 2.5, None, 0)
    assert end_step(fake, 8) == 42.0
    iteration, function = controller.forward_backward.call_args.args
    assert iteration == 8 and function.args == (schedule,)
    iteration, values = controller.end_iteration.call_args.args
    assert iteration == 8
    assert values.pop("tokens_per_s") > 0 and values.pop("step_s") > 0
    assert values == {"loss": 2.0, "grad_norm": 2.5, "lr": 0.3}


def test_an_aborted_iteration_passes_through(fake: Any, controller: Any) -> None:
    """The rerun state machine ends an iteration without losses and norm."""
    fake.aborts = True
    result = fake.training.train_step(*ARGUMENTS, schedule, iteration=7)
    assert result == ({}, True, True, True, 16, None, None, 0)
    end_step(fake, 8)
    assert math.isnan(controller.end_iteration.call_args.args[1]["loss"])


def test_an_evaluation_is_reported_once(fake: Any, controller: Any) -> None:
    expected = ({"lm loss": 1.5}, None, False)
    assert fake.training.evaluate("step", "data", model="model") == expected
    names = [name for name, *_ in controller.mock_calls]
    entered = ["evaluation", "evaluation().__enter__", "evaluation().__exit__"]
    assert names == ["evaluations.next_name", *entered]
    controller.evaluation.assert_called_once_with("validation")
    end_step(fake, 1)
    end_step(fake, 3)
    first, second = (call.args[1] for call in controller.end_iteration.call_args_list)
    assert first["validation_loss"] == 1.5 and "loss" not in first
    assert "validation_loss" not in second
    controller.evaluations.iteration_is_open = False  # after the last iteration
    fake.training.evaluate("step", "data", model="model")
    controller.end_evaluation.assert_called_once_with({"validation_loss": 1.5})


STATE = {"version": 2, "iteration": 3}


@pytest.fixture
def session(fake: Any) -> Session:
    registry = Registry((megatron_lm.save, megatron_lm.load))
    registry.install({"--snip"})
    return registry.session


def save(fake: Any, ckpt_format: str = "torch_dist") -> Any:
    args = Namespace(ckpt_format=ckpt_format)
    return fake.checkpointing.generate_state_dict(args, "model", iteration=3)


def load(fake: Any, rank0: bool = False, finetune: bool = False) -> Any:
    args = Namespace(finetune=finetune, ckpt_format="torch_dist")
    return fake.checkpointing._load_base_checkpoint("/nowhere", args, rank0=rank0)


@pytest.mark.parametrize("ckpt_format", ["torch_dist", "torch"])
def test_the_state_is_saved_under_one_key(fake: Any, session: Session, ckpt_format: str) -> None:
    session.controller = Mock()
    session.controller.state().to_dict.return_value = STATE
    assert save(fake, ckpt_format) == {"model": "model", "snip": STATE}
    session.controller.state.assert_called_with(3)


def test_a_failure_does_not_cost_the_checkpoint(
    fake: Any, session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    session.controller = Mock(state=Mock(side_effect=RuntimeError("a bug")))
    assert save(fake) == {"model": "model"}
    assert "checkpoint of iteration 3 has no SNIP state: RuntimeError: a bug" in caplog.text


def test_converting_a_checkpoint_keeps_what_was_loaded(fake: Any, session: Session) -> None:
    assert "snip" not in save(fake)
    session.loaded_state = dict(STATE)
    assert save(fake)["snip"] == STATE


def test_the_last_reading_gives_the_state(fake: Any, session: Session) -> None:
    fake.loaded = {"iteration": 3, "snip": STATE}
    assert load(fake, rank0=True) == (fake.loaded, "/nowhere", False, "global")
    assert session.loaded_state is None
    load(fake)
    assert session.loaded_state == STATE


@pytest.mark.parametrize("why", ["finetune", "release", "nothing", "without"])
def test_a_new_run_ignores_it(fake: Any, session: Session, why: str) -> None:
    session.loaded_state = {"iteration": 1}
    found = {"iteration": 3, "snip": STATE}
    fake.loaded = {"nothing": None, "without": {"iteration": 3}}.get(why, found)
    fake.release = why == "release"
    load(fake, finetune=why == "finetune")
    assert session.loaded_state is None

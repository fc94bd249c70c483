"""Megatron's writers: its iterations, its interval, its own numbers left to it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megatron_snip.reporting.megatron_writers import MegatronWriters
from tests.unit.reporting.runs import Shape, config, tell
from tests.unit.reporting.test_wandb_writer import Run


class Config:
    def __init__(self) -> None:
        self.given: dict[str, Any] = {}

    def update(self, values: dict[str, Any], allow_val_change: bool) -> None:
        assert allow_val_change  # a W&B run that is gone on with has the key already
        self.given |= values


class Board:
    def __init__(self) -> None:
        self.scalars: dict[str, list[int]] = {}

    def add_scalar(self, name: str, value: float, index: int) -> None:
        self.scalars.setdefault(name, []).append(index)


def test_steps_are_megatrons_iterations_at_its_own_interval() -> None:
    board = Board()
    shape = Shape(config(enabled=False), steps=12)
    tell(MegatronWriters(board, None, {}, interval=5), shape)
    assert board.scalars["snip/linears/lowest_precision_fraction"] == [5, 10]
    for name in ("loss", "lr", "grad_norm", "validation_loss"):
        assert f"snip/training/{name}" not in board.scalars


def test_the_settings_join_the_config_of_megatrons_wandb_run() -> None:
    module = SimpleNamespace(run=Run(step=0), config=Config())
    writers = MegatronWriters(None, module, {"interval": 8})
    writers.metrics(3, {"lowest_precision_fraction": 0.5})
    assert module.config.given == {"snip": {"interval": 8}}
    assert [step for step, _ in module.run.rows] == [4]


def test_after_megatron_has_finished_its_run_nothing_is_logged() -> None:
    module = SimpleNamespace(run=Run(step=0), config=Config())
    run = module.run
    writers = MegatronWriters(None, module, {})
    module.run = None
    writers.metrics(3, {"loss": 1.0})
    writers.close()
    assert run.rows == []

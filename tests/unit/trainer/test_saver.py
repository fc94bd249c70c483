"""When a checkpoint is written, and when a run stops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_snip.trainer.config import TrainConfig
from megatron_snip.trainer.saver import Saver


class Checkpoints:
    def __init__(self) -> None:
        self.steps: list[int] = []

    def save(self, progress: Any) -> None:
        assert progress.snip == f"state {progress.step}"
        assert (progress.first_validation_loss, progress.validation_loss) == (5.0, 4.0)
        self.steps.append(progress.step)


class Requests:
    def __init__(self, at: int | None) -> None:
        self.at, self.step = at, 0

    def agreed(self) -> str | None:
        self.step += 1
        return "SIGTERM" if self.step == self.at else None


def run(signal_at: int | None = None, **values: Any) -> tuple[list[int], int, str | None]:
    """(steps saved, steps made, why stopped) of a run of 10 steps."""
    checkpoints = Checkpoints()
    config = TrainConfig(train_iters=10, lr_warmup_iters=0, **values)
    saver = Saver(config, checkpoints, Requests(signal_at), lambda step: f"state {step}")  # type: ignore[arg-type, return-value]
    for step in range(1, 11):
        why = saver.after_step(step, 5.0, 4.0)
        if why is not None:
            return checkpoints.steps, step, why
    return checkpoints.steps, 10, None


SAVE = {"save": Path("checkpoints")}


@pytest.mark.parametrize(
    ("values", "signal_at", "expected"),
    [
        ({}, None, ([], 10, None)),
        (SAVE, None, ([10], 10, None)),
        ({**SAVE, "save_interval": 4}, None, ([4, 8, 10], 10, None)),
        ({**SAVE, "save_interval": 4}, 6, ([4, 6], 6, "SIGTERM")),
        (SAVE, 10, ([10], 10, None)),  # it came too late to stop anything
        ({**SAVE, "exit_interval": 4}, None, ([4], 4, "exit_interval")),
        ({"exit_interval": 4}, None, ([], 4, "exit_interval")),
        ({**SAVE, "exit_interval": 3, "save_interval": 3}, 3, ([3], 3, "SIGTERM")),
    ],
)
def test_saves_and_stops_where_it_is_due(
    values: dict[str, Any], signal_at: int | None, expected: Any
) -> None:
    assert run(signal_at, **values) == expected

"""Functions that test_trainer.py and test_checkpoints.py run on ranks."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_snip.errors import SnipError
from megatron_snip.patches import cpu
from megatron_snip.trainer import session
from megatron_snip.trainer.config import TrainConfig, make_train_config
from megatron_snip.trainer.model import (
    TrainingState,
    build_training_state,
    destroy_parallel_state,
    initialize_parallel_state,
)
from tests.distributed.workers.small_model import digest  # and measure in first iterations


def run_all(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Run one after the other; return what each gave, by name."""
    cpu.install()
    results = {}
    for name, values in runs.items():
        print("run", name, flush=True)
        stop = values.pop("stop", 0)
        results[name] = run_one(make_train_config(values), stop)
    return results


def run_one(config: TrainConfig, stop: int = 0) -> dict[str, Any]:
    """One run, as `session.run_rank` makes it; in iteration `stop` the last rank gets a signal."""
    session.check_run(config, dist.get_world_size())
    dist.barrier()  # all have looked at the folders before one writes
    initialize_parallel_state(config)
    states: list[TrainingState] = []
    building, training = session.build_training_state, session.train

    def train(state: Any, datasets: Any, hook: Any, *rest: Any) -> Any:
        forward_backward = hook.forward_backward

        def signalled(iteration: int, *arguments: Any, **kwargs: Any) -> Any:
            if iteration == stop and dist.get_rank() == dist.get_world_size() - 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            return forward_backward(iteration, *arguments, **kwargs)

        hook.forward_backward = signalled
        return training(state, datasets, hook, *rest)

    def build(*args: Any) -> TrainingState:
        states.append(build_training_state(*args))
        return states[0]

    session.build_training_state, session.train = build, train
    try:
        result = session.run_session(config, None)
    finally:
        session.build_training_state, session.train = building, training
        destroy_parallel_state()
    return {
        "iterations": result.iterations,
        "stopped": result.stopped,
        "first_validation_loss": result.first_validation_loss,
        "validation_loss": result.validation_loss,
        "weights": digest([p for chunk in states[0].model for p in chunk.parameters()]),
        "metrics": read_metrics(config.run_dir),
    }


def errors(runs: dict[str, dict[str, Any]]) -> dict[str, tuple[str, str] | None]:
    cpu.install()
    found: dict[str, tuple[str, str] | None] = {}
    for name, values in runs.items():
        try:
            run_one(make_train_config(values))
            found[name] = None
        except SnipError as error:
            found[name] = type(error).__name__, str(error)
        dist.barrier()
    return found


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The run's metrics without wall times."""
    dist.barrier()
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    timed = ("tokens_per_s", "step_s", "wall_s", "refresh_s", "wait_s")
    return [{k: v for k, v in row.items() if k not in timed} for row in rows]

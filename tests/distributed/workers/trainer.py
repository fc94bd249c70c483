"""What test_trainer.py runs on ranks: short trainings, several layouts in one process."""

from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_snip.patches import cpu
from megatron_snip.trainer.config import make_train_config
from megatron_snip.trainer.data import build_datasets
from megatron_snip.trainer.loop import PlainTraining, train
from megatron_snip.trainer.model import (
    build_training_state,
    destroy_parallel_state,
    initialize_parallel_state,
)
from tests.distributed.workers.small_model import digest


def run_layouts(layouts: dict[str, dict[str, Any]], folder: str) -> dict[str, Any]:
    """Train once a layout; return what each gave, by name."""
    cpu.install()
    results = {}
    for name, values in layouts.items():
        print("layout", name, flush=True)
        results[name] = run_layout(values, Path(folder) / name)
    return results


def run_layout(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    config = make_train_config({**values, "run_dir": folder})
    initialize_parallel_state(config)
    try:
        state = build_training_state(config)
        datasets = build_datasets(config, dist.group.WORLD)
        hook = Metrics()
        result = train(config, state, datasets, hook)
        return {
            "losses": [row["loss"] for row in hook.rows],
            "grad_norms": [row["grad_norm"] for row in hook.rows],
            "first_validation_loss": result.first_validation_loss,
            "validation_loss": result.validation_loss,
            "weights": digest([p for chunk in state.model for p in chunk.parameters()]),
        }
    finally:
        destroy_parallel_state()


class Metrics(PlainTraining):
    """Keeps the metrics of every iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, Any]] = []

    def end_iteration(self, iteration: int, metrics: dict[str, Any]) -> None:
        self.rows.append(metrics)

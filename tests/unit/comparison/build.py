"""Comparisons and outcomes to test with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_snip.comparison.outcome import Outcome
from megatron_snip.comparison.run import Run
from megatron_snip.comparison.settings import ComparisonConfig, make_comparison
from megatron_snip.comparison.store import Store
from megatron_snip.trainer.config import TrainConfig

TRAIN: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 16,
    "micro_batch_size": 4,
    "global_batch_size": 4,
    "lr_decay_style": "constant",
    "lr_warmup_iters": 2,
    "eval_iters": 1,
    "max_corpus_bytes": 200_000,
}


def comparison(**values: Any) -> ComparisonConfig:
    """A small comparison."""
    given = {"train": TRAIN, "forks": {"base_steps": 6, "steps": 4}, "lowest": ("fp3",), "seeds": 2}
    return make_comparison({**given, **values})


def outcome(key: str, validation: float, losses: tuple[float, ...] = (2.0, 1.9)) -> Outcome:
    """A finished run's numbers."""
    steps = tuple(range(6, 6 + len(losses)))
    return Outcome(
        key, steps, losses, steps[-1:], (validation,), 0.75, {"fp3": 0.75, "fp8": 0.25}, 0, 1.5
    )


class FakeStore(Store):
    """A store whose runs leave an outcome and nothing else."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.prepared: list[str]
        object.__setattr__(self, "prepared", [])

    def prepare(self, run: Run) -> TrainConfig:
        self.prepared.append(run.key)
        return self.config_of(run)

    def finished(self, run: Run) -> bool:
        return self.outcome(run) is not None

    def finish(self, run: Run) -> Outcome:
        found = outcome(run.key, 2.0)
        (self.path / "outcomes").mkdir(parents=True, exist_ok=True)
        path = self.path / "outcomes" / f"{run.key}.json"
        path.write_text(json.dumps(found.to_json()))
        return found

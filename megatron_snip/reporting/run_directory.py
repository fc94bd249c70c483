"""A run's directory: what was asked for, what was measured, what was decided.

    config.yaml               the resolved settings
    versions.json             of everything that decides numbers
    metrics.jsonl             one JSON object a training step
    problems/<step>.json      the planner's problem at each refresh
    divergences/<step>.json   the divergences and statistics behind it
    plans/<iteration>.json    the plan made from it (iteration = step + 1)
    precision/<step>.json     what every linear resolved to from that step on (--snip-precision-log)

A line of metrics.jsonl holds `step` (0-based), what the training loop measured (loss, grad_norm,
lr, tokens_per_s, validation_loss where there was one), `lowest_precision_fraction` (share of linear
FLOPs in the lowest precision) and `wall_s`, the seconds since the line before (evaluations and
checkpoints included). Where they happened, also:

    refresh_s         seconds that the refresh of this step took (part of wall_s)
    plan_step         iteration of the plan applied before this step: plans/<plan_step>.json
    changed_linears   linears whose option that plan changed
    wait_s            seconds that training waited for it (part of wall_s)
    events            [{"kind": "kept" | "guard" | "fallback", "message": str}]

A resumed run appends; where it went back, later lines of a step replace earlier ones, and lines of
steps not yet made again are void (`run_record.py` reads them so).

Files are written whole (temporary file, fsync, rename); metrics.jsonl is appended line by line and
put on disk at every plan, so a killed run loses no line and a crashed machine no decision.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
from pathlib import Path
from typing import IO, Any

import yaml

from megatron_snip.directory import DirectoryLock
from megatron_snip.files import write_atomic
from megatron_snip.planning.plan import PrecisionPlan, write_plan
from megatron_snip.planning.problem import PlanningProblem, write_problem

PACKAGES = (
    "megatron-snip",
    "megatron-core",
    "torch",
    "transformer-engine",
    "ortools",
    "numpy",
    "wandb",
)
"""Distributions whose versions a run records."""


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of `PACKAGES` (None where not installed)."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


class RunDirectory:
    """Writes a run's files; rank 0 only.

    Attributes:
        path: the directory; made (with parents) at construction.
    """

    def __init__(self, path: Path, lock: DirectoryLock | None = None) -> None:
        """Open a directory; `lock`, if given, is released by `close`."""
        self.path = path
        self._lock = lock
        path.mkdir(parents=True, exist_ok=True)
        self._metrics: IO[str] | None = None

    def start(self, config: dict[str, Any]) -> None:
        """Write config.yaml and versions.json."""
        write_atomic(self.path / "config.yaml", yaml.safe_dump(config, sort_keys=False))
        write_atomic(self.path / "versions.json", json.dumps(versions(), indent=1) + "\n")

    def metrics(self, values: dict[str, Any]) -> None:
        """Append one step's metrics; values that are not finite become null."""
        if self._metrics is None:
            # Line buffered: a killed run never leaves half a line for the next one to append to.
            self._metrics = (self.path / "metrics.jsonl").open("a", buffering=1, encoding="utf-8")
        self._metrics.write(json.dumps({k: _finite(v) for k, v in values.items()}) + "\n")

    def problem(self, step: int, problem: PlanningProblem) -> Path:
        """Write problems/<step>.json; return its path."""
        path = self._made("problems") / f"{step}.json"
        write_problem(problem, path)
        return path

    def divergences(self, step: int, divergences: dict[str, Any]) -> Path:
        """Write divergences/<step>.json; return its path."""
        return self._json("divergences", step, divergences)

    def precision(self, step: int, table: dict[str, Any]) -> Path:
        """Write precision/<step>.json; return its path."""
        return self._json("precision", step, table)

    def plan(self, plan: PrecisionPlan) -> Path:
        """Write plans/<iteration>.json and flush the metrics; return the plan's path."""
        path = self._made("plans") / f"{plan.iteration}.json"
        write_plan(plan, path)
        self.flush()
        return path

    def has_plan(self, iteration: int) -> bool:
        """Whether there is a plans/<iteration>.json."""
        return (self.path / "plans" / f"{iteration}.json").is_file()

    def flush(self) -> None:
        """Put the metrics written so far on disk."""
        if self._metrics is not None:
            self._metrics.flush()
            os.fsync(self._metrics.fileno())

    def close(self) -> None:
        """Flush and close."""
        if self._metrics is not None:
            self.flush()
            self._metrics.close()
            self._metrics = None
        if self._lock is not None:
            self._lock.release()

    def _json(self, kind: str, step: int, value: dict[str, Any]) -> Path:
        path = self._made(kind) / f"{step}.json"
        write_atomic(path, json.dumps(value, allow_nan=False) + "\n")
        return path

    def _made(self, kind: str) -> Path:
        directory = self.path / kind
        directory.mkdir(exist_ok=True)
        return directory


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value

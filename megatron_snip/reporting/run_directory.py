"""A run's directory.

    config.yaml                    the resolved settings
    versions.json                  versions of every package that decides numbers
    metrics.jsonl                  one JSON object per iteration
    problems/<iteration>.json      the planning problem of each refresh
    divergences/<iteration>.json   the divergences and statistics behind it
    health/<iteration>.json        what quantization did to each tensor (docs/measuring.md)
    plans/<iteration>.json         the plan made from it
    precision/<iteration>.json     what every linear runs from that iteration on, and rules that
                                   decide for none

JSON files are written atomically. metrics_file.py describes metrics.jsonl, opening.py how a run
takes its directory.
"""

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from megatron_snip.directory_lease import Lease
from megatron_snip.divergence.quality_loss import divergences_dict
from megatron_snip.errors import SnipError, UsageError
from megatron_snip.files import write_atomic
from megatron_snip.output import in_utf8, yaml_text
from megatron_snip.planning.plan import PrecisionPlan, read_plan, write_plan
from megatron_snip.planning.problem import write_problem
from megatron_snip.reporting.events import (
    Event,
    Measurement,
    Metrics,
    Notice,
    PlanApplied,
    Settings,
)
from megatron_snip.reporting.metrics_file import MetricsWriter, last_iteration, plans_named
from megatron_snip.version import versions


class RunDirectory:
    """Writes a run's files; rank 0 only. A `Writer`.

    Attributes:
        path: the directory; created (with parents) at construction.
    """

    def __init__(
        self,
        path: Path,
        lease: Lease | None = None,
        take_over: Callable[[], None] = lambda: None,
    ) -> None:
        """Open a directory.

        Args:
            path: need not exist.
            lease: the directory's, which `close` gives back. Once another job has taken it, nothing
                more is written.
            take_over: makes the directory this run's; `begin` calls it.
        """
        self.path = path
        self._lease = lease
        self._is_lost = False
        self._take_over: Callable[[], None] | None = take_over
        path.mkdir(parents=True, exist_ok=True)
        self._settings: dict[str, Any] = {}
        self._metrics_path = path / "metrics.jsonl"
        self._metrics = MetricsWriter(self._metrics_path)
        self._row: dict[str, Any] = {}
        self._row_at = 0  # the iteration that it belongs to
        self._last_row_at = time.perf_counter()

    def begin(self) -> None:
        """Make the directory this run's; a second call does nothing.

        Before, nothing in it has changed, so a run that is refused has harmed no other. The first
        event begins it too.

        Raises:
            OSError: if the directory cannot be written.
        """
        if self._take_over is not None:
            self._take_over()
            self._take_over = None

    def start(self, config: dict[str, Any]) -> None:
        """Write config.yaml and versions.json."""
        self._settings = config
        write_atomic(self.path / "config.yaml", yaml_text(config))
        write_atomic(self.path / "versions.json", json.dumps(versions(), indent=1) + "\n")

    def write(self, event: Event) -> None:
        """Write an event's files; keep what belongs to the iteration's line until it ends.

        Raises:
            SnipError: once, if another job has taken the directory.
        """
        if self._is_lost:
            return
        lost_to = None if self._lease is None else self._lease.lost_to()
        if lost_to is not None:
            self._is_lost = True
            raise SnipError(
                f"'{self.path}' was taken by {lost_to}; this job writes nothing there any more"
            )
        self.begin()
        self._row_at = event.iteration
        match event.payload:
            case Settings(values, fixed):
                config = {**self._settings, "snip": values}
                self.start({**config, "fixed": fixed} if fixed else config)
            case Measurement() as measured:
                self._row["refresh_s"] = measured.seconds
                table = divergences_dict(measured.divergences)
                self._write_json("divergences", event.iteration, table)
                self._write_json("health", event.iteration, measured.health.to_dict())
                write_problem(measured.problem, self._path("problems", event.iteration))
            case PlanApplied() as applied:
                self._plan(event.iteration, applied)
            case Notice(kind, message):
                notice = {"kind": kind, "message": in_utf8(message)}
                self._row.setdefault("notices", []).append(notice)
            case Metrics(values, is_addition=True):
                self._metrics.complete_last(values)
            case Metrics(values):
                now = time.perf_counter()
                wall = {"wall_s": now - self._last_row_at}
                self._metrics.append({"iteration": event.iteration, **values, **wall, **self._row})
                self._row = {}
                self._last_row_at = now

    def close(self) -> None:
        """Sync, close and give the lease back; a second call does nothing.

        A job that ends within an iteration leaves its notices, which may say why, in a row.
        """
        with ExitStack() as stack:
            if self._lease is not None:
                stack.callback(self._lease.release)
            stack.callback(self._metrics.close)
            self._is_lost = self._is_lost or (
                self._lease is not None and self._lease.lost_to() is not None
            )
            if (
                not self._is_lost
                and "notices" in self._row
                and self._row_at > last_iteration(self._metrics_path)
            ):
                self._metrics.append({"iteration": self._row_at, **self._row})
            self._row = {}

    def _plan(self, iteration: int, applied: PlanApplied) -> None:
        plan = applied.plan
        # Two plans have the same iteration if a run resumes with another plan while one is solved.
        number = plan.iteration
        while _holds_another(self._path("plans", number), plan):
            number += 1
        path = self._path("plans", number)
        if applied.resolved is not None:
            resolved = replace(applied.resolved, plan_iteration=number)
            self._write_json("precision", iteration, resolved)
        if applied.resumed and path.is_file():
            named = list(plans_named(self._metrics_path, iteration).values())
            if named[-1:] == [number]:
                return
        # First the file: `read_run` refuses a row that names a plan without a file.
        write_plan(plan, path)
        self._row |= {
            "plan_iteration": number,
            "changed_linears": applied.num_changed,
            "wait_s": applied.waited_s,
        }
        if applied.saving_s is not None:
            self._row["predicted_saving_s"] = applied.saving_s

    def _write_json(self, folder: str, iteration: int, value: object) -> None:
        # Faster than `json`, and here tables have some 100 numbers for each linear.
        text = to_json(value, inf_nan_mode="null").decode() + "\n"
        write_atomic(self._path(folder, iteration), text)

    def _path(self, folder: str, iteration: int) -> Path:
        path = self.path / folder / f"{iteration}.json"
        path.parent.mkdir(exist_ok=True)
        return path


def _holds_another(path: Path, plan: PrecisionPlan) -> bool:
    """Return whether a file exists and holds another plan; a damaged one holds none."""
    try:
        return path.is_file() and read_plan(path).digest != plan.digest
    except UsageError:
        return False

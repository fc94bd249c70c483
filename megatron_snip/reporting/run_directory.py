"""A run's directory.

    config.yaml                    the resolved settings
    versions.json                  versions of every package that decides numbers
    metrics.jsonl                  one JSON object per iteration
    problems/<iteration>.json      the planning problem of each refresh
    divergences/<iteration>.json   the divergences and statistics behind it
    health/<iteration>.json        what quantization did to each tensor (docs/measuring.md)
    plans/<iteration>.json         the plan made from it
    precision/<iteration>.json     what every linear runs from that iteration on

A line of metrics.jsonl holds `iteration` (Megatron's, 1-based), what the training loop measured
(loss, grad_norm, lr, tokens_per_s, validation_loss where there was one; step_s, the seconds of its
training step, where it measured nothing and was not the first under its plan),
`lowest_precision_fraction` (share of the linears' FLOPs in the lowest precision) and `wall_s`, the
seconds since the line before (evaluations and checkpoints included). Evaluations after the end of
training add their values to the last line (final_validation_loss, test_loss). Where they happened,
also:

    refresh_s         seconds that measuring added to this iteration's refresh (part of wall_s)
    plan_iteration    the plan applied before this iteration: plans/<plan_iteration>.json
    changed_linears   linears whose option that plan changed
    wait_s            seconds that training waited for it (part of wall_s)
    predicted_saving_s   seconds that it saves in each step against BF16 (--snip-cost time)
    notices           [{"kind": "refresh_failed" | "guard" | "reverted" | "health", "message": str}]

A resumed run drops lines that a crash damaged, and appends. Where it went back, later lines of an
iteration replace earlier ones, and lines of iterations that were not repeated yet are void
(`run_record.py` reads them so).

JSON files are written atomically. metrics.jsonl is appended line by line and synced at every plan:
a killed run loses no line.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, Literal

from pydantic_core import to_json

from megatron_snip.directory import (
    check_new_run,
    clear_run,
    mark,
    mark_new_run,
    own_files,
    run_id,
)
from megatron_snip.directory_lease import Lease, take_lease
from megatron_snip.divergence.quality_loss import divergences_dict
from megatron_snip.errors import SnipError, UsageError
from megatron_snip.files import parse_json, without_nan, write_atomic
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
from megatron_snip.version import versions

logger = logging.getLogger(__name__)


OldRun = Literal["continue", "archive", "delete", "refuse"]
"""What becomes of the files of an earlier run: the new run continues them, they move to a folder
`previous-N`, they are deleted, or they are an error."""


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
        self._metrics: IO[str] | None = None
        self._row: dict[str, Any] = {}
        self._row_at = 0  # the iteration that it belongs to
        self._last_row: dict[str, Any] = {}
        self._last_row_start = 0  # the place in the file, in bytes
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
                self._complete_last_row(values)
            case Metrics(values):
                now = time.perf_counter()
                wall = {"wall_s": now - self._last_row_at}
                self.append_metrics({"iteration": event.iteration, **values, **wall, **self._row})
                self._row = {}
                self._last_row_at = now

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl; values that are not finite become null."""
        if self._metrics is None:
            # Line buffered: a killed run never leaves half a line for the next one to append to.
            self._metrics = (self.path / "metrics.jsonl").open("a", buffering=1, encoding="utf-8")
        self._last_row = row
        # Not `tell`: it does not know what `_complete_last_row` added.
        self._last_row_start = self._metrics.seek(0, os.SEEK_END)
        self._metrics.write(json.dumps(without_nan(row)) + "\n")
        if "plan_iteration" in row:
            self._sync()

    def _complete_last_row(self, values: dict[str, Any]) -> None:
        """Add values to the last line of metrics.jsonl.

        The longer line is written over it at once, so a killed run loses neither.
        """
        if self._metrics is None:
            return
        self._last_row = {**self._last_row, **values}
        line = json.dumps(without_nan(self._last_row)) + "\n"
        with open(self._metrics.name, "r+b", buffering=0) as stream:
            stream.seek(self._last_row_start)
            stream.write(line.encode())
            stream.truncate()

    def close(self) -> None:
        """Sync, close and give the lease back; a second call does nothing.

        A job that ends within an iteration leaves its notices, which may say why, in a row.
        """
        with ExitStack() as stack:
            if self._lease is not None:
                stack.callback(self._lease.release)
            stack.callback(self._close_metrics)
            self._is_lost = self._is_lost or (
                self._lease is not None and self._lease.lost_to() is not None
            )
            if (
                not self._is_lost
                and "notices" in self._row
                and self._row_at > self._last_iteration()
            ):
                self.append_metrics({"iteration": self._row_at, **self._row})
            self._row = {}

    def _close_metrics(self) -> None:
        if self._metrics is None:
            return
        try:
            with self._metrics:
                self._sync()
        finally:
            self._metrics = None

    def _last_iteration(self) -> int:
        """Return the iteration of the last complete line, 0 without one."""
        try:
            text = (self.path / "metrics.jsonl").read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return 0
        return max(map(_iteration_of, text.split("\n")[-2:-1]), default=0)

    def _plan(self, iteration: int, applied: PlanApplied) -> None:
        plan = applied.plan
        # Two plans have the same iteration if a run resumes with another plan while one is solved.
        number = plan.iteration
        while _holds_another(self._path("plans", number), plan):
            number += 1
        path = self._path("plans", number)
        if applied.resolved is not None:
            resolved = {**applied.resolved, "plan_iteration": number}
            self._write_json("precision", iteration, resolved)
        if applied.resumed and path.is_file() and self._plan_at(iteration) == number:
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

    def _plan_at(self, iteration: int) -> int | None:
        """Return the plan that metrics.jsonl names last up to an iteration."""
        named = _named_plans(self.path, iteration)
        return named[-1][1] if named else None

    def _sync(self) -> None:
        if self._metrics is not None:
            self._metrics.flush()
            os.fsync(self._metrics.fileno())

    def _write_json(self, folder: str, iteration: int, value: dict[str, Any]) -> None:
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


def open_run(
    path: Path, settings: dict[str, Any], old_run: OldRun, done: int | None = None
) -> RunDirectory:
    """Rank 0: take a run's directory until it is closed. Its files change when the run begins.

    Args:
        path: need not exist.
        settings: the content of config.yaml.
        old_run: what becomes of the files of an earlier run, when this one begins
            (`RunDirectory.begin`); files that SNIP did not write stay.
        done: where a run continues, the last iteration whose files stay; None keeps all of them.

    Raises:
        UsageError: if another job writes there, for the reasons of `check_new_run`, or if the run
            itself reads a file that it would delete or move.
        OSError: if the directory cannot be written.
    """
    lease = take_lease(path, continues=old_run == "continue")
    try:
        check_new_run(path, overwrite=old_run != "refuse")
        done = sys.maxsize if done is None else done
        # Listed now, because by the time the run begins it may have made files of its own.
        old_files = list(own_files(path) if old_run != "continue" else _later_files(path, done))
        _check_inputs(settings.get("snip", {}), old_files)
    except BaseException:
        lease.release()
        raise

    def take_over() -> None:
        mark(path)
        if old_run == "continue":
            drop_later_iterations(path, done)
            if not run_id(path):  # an early release marked it without an identity
                mark_new_run(path)
        else:
            archive = clear_run(path, old_files, archive=old_run != "delete")
            if archive is not None:
                logger.warning("snip: moved files of an earlier run to '%s'", archive)
            mark_new_run(path)
        directory.start(settings)

    directory = RunDirectory(path, lease, take_over)
    return directory


def holds_run(path: Path, identity: str, history: Sequence[tuple[int, str]]) -> bool:
    """Return whether a directory is that of the run of a checkpoint.

    Args:
        path: the directory; need not exist.
        identity: what identifies the run in the checkpoint. Checkpoints of megatron-snip 0.2.0 have
            "". Then the directory is the run's if it records each plan of the history.
        history: (iteration, digest) of each plan after the run's first one.

    Raises:
        UsageError: if the directory's marker cannot be read.
    """
    if identity:
        return identity == run_id(path)
    # A plan and its revert can have the same iteration, whose row names the last plan.
    plans = dict(history)
    numbers = dict(_named_plans(path, max(plans, default=0)))
    try:
        recorded = {
            at: read_plan(path / "plans" / f"{numbers.get(at)}.json").digest for at in plans
        }
    except UsageError:  # a row or a file that is not there
        return False
    return recorded == plans != {}


def _check_inputs(snip: Mapping[str, Any], old_files: Iterable[Path]) -> None:
    """Refuse settings that name a file among those that are deleted or moved before it is read."""
    settings = ("plan_file", "calibration", "reference")
    inputs = {name: snip[name] for name in settings if snip.get(name)}
    named = {Path(value).resolve(): name for name, value in inputs.items()}
    for file in old_files:
        # A reference may be a run's directory; what counts there is its metrics.jsonl.
        name = named.get(file.resolve()) or named.get(file.resolve().parent)
        if name is not None:
            raise UsageError(
                f"'{inputs[name]}' is a file of an earlier run, which this run deletes or moves; "
                "copy it to another folder first",
                field=name,
            )


def drop_later_iterations(path: Path, done: int) -> None:
    """Drop the files and rows of later iterations, and lines that a crash left damaged."""
    for file in _later_files(path, done):
        file.unlink()
    metrics = path / "metrics.jsonl"
    if metrics.is_file():
        lines = metrics.read_text(encoding="utf-8", errors="replace").split("\n")
        rows = [line for line in lines if 1 <= _iteration_of(line) <= done]
        write_atomic(metrics, "".join(f"{line}\n" for line in rows))


def _named_plans(path: Path, iteration: int) -> list[tuple[int, int | None]]:
    """Return (iteration of the row, its plan) of the rows up to an iteration, ascending.

    A crash of the machine can lose the row that named the plan of a checkpoint.
    """
    metrics = path / "metrics.jsonl"
    if not metrics.is_file():
        return []
    named: list[tuple[int, int | None]] = []
    for line in metrics.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]:
        at = _iteration_of(line)
        while named and named[-1][0] >= at > 0:
            named.pop()  # the run went back to a checkpoint
        if 0 < at <= iteration and '"plan_iteration"' in line:
            number = parse_json(line, "metrics.jsonl").get("plan_iteration")
            named.append((at, number if isinstance(number, int) else None))
    return named


def _later_files(path: Path, done: int) -> list[Path]:
    return [f for f in own_files(path) if f.stem.isdecimal() and int(f.stem) > done]


def _iteration_of(line: str) -> int:
    """Return the iteration of a row; 0 where a crash of the machine damaged the line."""
    try:
        iteration = parse_json(line, "metrics.jsonl")["iteration"]
    except (UsageError, KeyError, TypeError):
        return 0
    return iteration if isinstance(iteration, int) else 0

"""metrics.jsonl: one JSON object per iteration, appended while the run trains, and read again.

A line holds `iteration` (Megatron's, 1-based), what the training loop measured (loss, grad_norm,
lr, tokens_per_s, validation_loss where there was one; step_s, the seconds of its training step,
where it measured nothing and was not the first under its plan), `lowest_precision_fraction` (share
of the linears' FLOPs in the lowest precision) and `wall_s`, the seconds since the line before
(evaluations and checkpoints included). Evaluations after the end of training add their values to
the last line (final_validation_loss, test_loss). Where they happened, also:

    refresh_s         seconds that measuring added to this iteration's refresh (part of wall_s)
    plan_iteration    the plan applied before this iteration: plans/<plan_iteration>.json
    changed_linears   linears whose option that plan changed
    wait_s            seconds that training waited for it (part of wall_s)
    predicted_saving_s   seconds that it saves in each step against BF16 (--snip-cost time)
    notices           [{"kind": "refresh_failed" | "guard" | "reverted" | "health", "message": str}]

Where a resumed run went back to a checkpoint it appends as always. So a line makes all lines before
it void that are of its own iteration or a later one (`_current_rows`): the run has not repeated
those later iterations yet, or has never made them under its present plan.
"""

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, model_validator
from pydantic.json_schema import SkipJsonSchema

from megatron_snip.errors import UsageError, listing, shown
from megatron_snip.files import checked, parse_json, read_text, without_nan, write_atomic

logger = logging.getLogger(__name__)

# Sums, and the axes of figures, must stay far from a double's overflow.
Number = Annotated[float, Field(ge=-1e150, le=1e150)] | None
Count = Annotated[int, Field(ge=0, lt=2**31)]


class _Notice(BaseModel, strict=True):
    kind: str
    message: str


class MetricsRow(BaseModel, strict=True):
    """A row of metrics.jsonl.

    A row with `plan_iteration` is the first one under a new plan. `plan_iteration` names the plan's
    file: it is the iteration at which the plan was asked for, usually `lag` before the row's own.
    """

    iteration: Annotated[Count, Field(ge=1)]
    plan_iteration: Count | None = None
    changed_linears: Count | None = None
    loss: Number = None
    validation_loss: Number = None
    lowest_precision_fraction: Number = None
    wall_s: Number = None
    refresh_s: Number = None
    wait_s: Number = None
    step_s: Number = None
    predicted_saving_s: Number = None
    notices: list[_Notice] = []
    evaluated: SkipJsonSchema[dict[str, Number]] = {}  # the file has its keys beside the others

    @model_validator(mode="before")
    @classmethod
    def _gather_evaluations(cls, value: Any) -> Any:
        """Gather what `--snip-eval-precision` found, by its name without `eval/`."""
        if not isinstance(value, dict):
            return value
        found = {k.removeprefix("eval/"): v for k, v in value.items() if k.startswith("eval/")}
        return {**value, "evaluated": found} if found else value


@dataclass(frozen=True)
class MetricRows:
    """metrics.jsonl.

    Attributes:
        rows: One row of the file for each iteration, in ascending order. `evaluated` has the values
            of the file that begin with `eval/`.
    """

    rows: tuple[dict[str, Any], ...]

    @property
    def last_iteration(self) -> int:
        """The last iteration that has ended; 0 if none has."""
        return int(self.rows[-1]["iteration"]) if self.rows else 0

    @property
    def refreshes(self) -> frozenset[int]:
        """The iterations at which a refresh ended."""
        return frozenset(row["iteration"] for row in self.rows if "refresh_s" in row)

    def column(self, name: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return (iterations, values) of the rows that have `name`; null becomes NaN."""
        rows = [row for row in self.rows if name in row]
        iterations = [row["iteration"] for row in rows]
        values = [np.nan if row[name] is None else row[name] for row in rows]
        return np.array(iterations, np.int64), np.array(values, np.float64)

    def last(self, name: str) -> float | None:
        """Return the last value of a column, or None if there is none."""
        for row in reversed(self.rows):
            if row.get(name) is not None:
                return float(row[name])
        return None

    def total(self, name: str) -> float:
        """Return the sum of a column, without NaN."""
        return float(np.nansum(self.column(name)[1]))

    def mean(self, name: str, start: int, end: int) -> float | None:
        """Return the mean of a column over iterations start .. end - 1, without NaN, or None."""
        at, values = self.column(name)
        found = values[(at >= start) & (at < end) & ~np.isnan(values)]
        return float(found.mean()) if found.size else None

    def gap_to(self, reference: Self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return (iterations, loss minus the reference's) where both losses are finite."""
        at, losses = self.column("loss")
        base_at, base = reference.column("loss")
        common, first, second = np.intersect1d(at, base_at, return_indices=True)
        gap = losses[first] - base[second]
        return common[np.isfinite(gap)], gap[np.isfinite(gap)]

    @property
    def notices(self) -> list[tuple[int, str, str]]:
        """(iteration, kind, message) of every notice, in order."""
        notices = []
        for row in self.rows:
            for notice in row.get("notices", ()):
                notices.append((row["iteration"], notice["kind"], notice["message"]))
        return notices


class MetricsWriter:
    """Appends to a metrics.jsonl, which need not exist. A killed run loses no line."""

    def __init__(self, path: Path) -> None:
        """Nothing is written before the first line."""
        self._path = path
        self._stream: IO[str] | None = None
        self._last_row: dict[str, Any] = {}
        self._last_row_start = 0  # the place in the file, in bytes

    def append(self, row: dict[str, Any]) -> None:
        """Append a line; values that are not finite become null. Syncs a line that names a plan."""
        if self._stream is None:
            # Line buffered: a killed run never leaves half a line for the next one to append to.
            self._stream = self._path.open("a", buffering=1, encoding="utf-8")
        self._last_row = row
        # Not `tell`: it does not know what `complete_last` added.
        self._last_row_start = self._stream.seek(0, os.SEEK_END)
        self._stream.write(json.dumps(without_nan(row)) + "\n")
        if "plan_iteration" in row:
            self._sync(self._stream)

    def complete_last(self, values: dict[str, Any]) -> None:
        """Add values to the last line that this writer wrote, if there is one.

        The longer line is written over it at once, so a killed run loses neither.
        """
        if self._stream is None:
            return
        self._last_row = {**self._last_row, **values}
        line = json.dumps(without_nan(self._last_row)) + "\n"
        with open(self._path, "r+b", buffering=0) as stream:
            stream.seek(self._last_row_start)
            stream.write(line.encode())
            stream.truncate()

    def close(self) -> None:
        """Sync and close; a second call does nothing."""
        stream = self._stream
        self._stream = None
        if stream is not None:
            with stream:
                self._sync(stream)

    @staticmethod
    def _sync(stream: IO[str]) -> None:
        stream.flush()
        os.fsync(stream.fileno())


def drop_damaged_lines(path: Path) -> None:
    """Rewrite a metrics.jsonl without lines that a crash of the machine left damaged."""
    if path.is_file():
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        write_atomic(path, "".join(f"{line}\n" for line in lines if _iteration_of(line)))


def last_iteration(path: Path) -> int:
    """Return the iteration of the last complete line; 0 without one."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return 0
    return max(map(_iteration_of, text.split("\n")[-2:-1]), default=0)


def plans_named(path: Path, until: int) -> dict[int, int]:
    """Return {first iteration under a plan: number of the plan's file} of a metrics.jsonl.

    Empty if the file cannot be read. A crash of the machine can lose the row that named the plan of
    a checkpoint.

    Args:
        path: need not exist.
        until: the last iteration that counts.
    """
    try:
        rows, _, _ = _current_rows(path)
    except UsageError:  # it is too large, for example
        return {}
    return {
        row["iteration"]: row["plan_iteration"]
        for row in rows
        if row.get("plan_iteration") is not None and row["iteration"] <= until
    }


def read_metrics(path: Path) -> MetricRows:
    """Read metrics.jsonl. A last line without its newline is left out.

    Other lines that are no row, such as those that a crash of the machine left, are left out with
    one warning, which names the first of them.

    Raises:
        UsageError: if no iteration has ended, the file cannot be read, or no line is a row.
    """
    rows, bad, num_lines = _current_rows(path)
    first_error = next(iter(bad.values()), None)
    if not rows and first_error is not None:
        raise first_error
    if not rows:
        raise UsageError(f"'{path}' has no metrics yet: no iteration has ended")
    if first_error is not None:
        logger.warning(
            "snip: %d of %d lines are left out (%s): %s",
            len(bad),
            num_lines,
            listing([str(number) for number in bad]),
            shown(first_error),
        )
    return MetricRows(tuple(rows))


def _current_rows(path: Path) -> tuple[list[dict[str, Any]], dict[int, UsageError], int]:
    """Return the rows that count, what is wrong by number of the line, and the number of lines."""
    text = read_text(path, f"metrics file '{path}'", errors="replace") if path.exists() else ""
    lines = text.split("\n")[:-1]
    rows: list[dict[str, Any]] = []
    bad: dict[int, UsageError] = {}
    for k, line in enumerate(lines, start=1):
        source = f"'{path}', line {k}"
        try:
            row = checked(MetricsRow, parse_json(line, source), source).model_dump(
                exclude_unset=True
            )
        except UsageError as error:
            bad[k] = error
            continue
        while rows and rows[-1]["iteration"] >= row["iteration"]:
            rows.pop()  # the run went back to a checkpoint
        rows.append(row)
    return rows, bad, len(lines)


def _iteration_of(line: str) -> int:
    """Return the iteration of a row; 0 where a crash of the machine damaged the line."""
    try:
        iteration = parse_json(line, "metrics.jsonl")["iteration"]
    except (UsageError, KeyError, TypeError):
        return 0
    return max(iteration, 0) if isinstance(iteration, int) else 0

"""MetricsLog: metrics.jsonl as it grows. `run_directory.py` says what a line holds.

A line counts once its newline is there. Where a resumed run went back to step s, everything from s
on that was written before is void: its training steps are made again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_snip.errors import UsageError
from megatron_snip.files import parse_json

_NUMBERS = frozenset(
    {
        "loss",
        "validation_loss",
        "grad_norm",
        "lr",
        "tokens_per_s",
        "lowest_precision_fraction",
        "wall_s",
        "refresh_s",
        "wait_s",
        "plan_step",
        "changed_linears",
    }
)


@dataclass(frozen=True)
class PlanMark:
    """A plan that was applied.

    Attributes:
        step: training step (0-based) before which it was applied.
        plan_step: the step that was measured; plans/<plan_step>.json.
        changed: linears whose option changed.
        wait_s: seconds that training waited for it.
    """

    step: int
    plan_step: int
    changed: int
    wait_s: float


@dataclass(frozen=True)
class EventMark:
    """An event, as in `reporter.Event`."""

    step: int
    kind: str
    message: str


class MetricsLog:
    """Reads a run's metrics.

    Attributes:
        path: the file; it need not exist yet.
        rows: one dict a training step, in the order of steps, none twice.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self._offset = 0
        self._line = 0

    def read_more(self) -> bool:
        """Read the lines written since the last call; return whether there were any.

        Raises:
            UsageError: if the file cannot be read or a whole line is not a step's metrics.
        """
        try:
            with self.path.open("rb") as stream:
                if stream.seek(0, 2) < self._offset:  # begun anew
                    self.rows, self._offset, self._line = [], 0, 0
                stream.seek(self._offset)
                added = stream.read()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise UsageError(f"cannot read '{self.path}': {error.strerror or error}") from None
        whole = added[: added.rfind(b"\n") + 1]
        for line in whole.splitlines():
            self._line += 1
            self._append(self._read(line))
        self._offset += len(whole)
        return bool(whole)

    @property
    def last_step(self) -> int:
        """The last training step that has ended, or -1."""
        return self.rows[-1]["step"] if self.rows else -1

    def column(self, name: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return (steps, values) of the rows that have `name`; null becomes NaN."""
        found = [(row["step"], row[name]) for row in self.rows if name in row]
        values = [np.nan if value is None else value for _, value in found]
        return np.array([step for step, _ in found], np.int64), np.array(values, np.float64)

    def last(self, name: str) -> float | None:
        """Return the last value of a column, or None if there is none."""
        for row in reversed(self.rows):
            if row.get(name) is not None:
                return float(row[name])
        return None

    @property
    def plans(self) -> list[PlanMark]:
        """Every plan applied, in order."""
        return [
            PlanMark(
                row["step"],
                int(row["plan_step"]),
                int(row.get("changed_linears") or 0),
                float(row.get("wait_s") or 0.0),
            )
            for row in self.rows
            if row.get("plan_step") is not None
        ]

    @property
    def events(self) -> list[EventMark]:
        """Every event, in order."""
        return [
            EventMark(row["step"], event["kind"], event["message"])
            for row in self.rows
            for event in row.get("events", ())
        ]

    def _append(self, row: dict[str, Any]) -> None:
        while self.rows and self.rows[-1]["step"] >= row["step"]:
            self.rows.pop()
        self.rows.append(row)

    def _read(self, line: bytes) -> dict[str, Any]:
        source = f"'{self.path}', line {self._line}"
        try:
            row = parse_json(line.decode("utf-8"), source)
        except UnicodeDecodeError:
            raise UsageError(f"{source} is not UTF-8 text") from None
        if not isinstance(row, dict) or not _is_count(row.get("step")):
            raise UsageError(f"{source} is not an object with a 'step'")
        for name in _NUMBERS & row.keys():
            if not isinstance(row[name], int | float | None) or isinstance(row[name], bool):
                raise UsageError(f"{source}: '{name}' is not a number")
        events = row.get("events", [])
        if not isinstance(events, list) or not all(map(_is_event, events)):
            raise UsageError(f"{source}: 'events' is not a list of kinds and messages")
        return row


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_event(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(value.get(key), str) for key in ("kind", "message")
    )

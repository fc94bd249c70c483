"""The rows of a comparison: one a branch, each found by its key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.machine import append_row, read_rows
from megatron_snip.errors import UsageError

GROUP = ("kind", "setup", "scenario", "low")
"""Rows that agree in these are compared with each other."""

KEY = (*GROUP, "seed", "data_seed", "variant", "target")
"""Names a row; `forks` and rows from before there were targets have no `target`."""


class ResultStore:
    """Rows of a JSON-lines file; each is found by its key.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rows = read_rows(path)

    def has(self, key: Mapping[str, Any]) -> bool:
        """Return whether there is a row with this key."""
        return any(all(row.get(k) == key.get(k) for k in KEY) for row in self.rows)

    def select(self, wanted: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the rows that have all these values."""
        return [row for row in self.rows if wanted.items() <= row.items()]

    def check_start(self, place: Mapping[str, Any], start: str) -> None:
        """Refuse to add rows to those of a place that started from another warm model.

        Raises:
            UsageError: if there is such a row.
        """
        if any(row.get("start") != start for row in self.select(place)):
            seed = place["seed"]
            raise UsageError(
                f"rows of seed {seed} started from another warm model; give --results another file"
            )

    def add(self, row: dict[str, Any]) -> None:
        """Append a row and print it."""
        self.rows.append(append_row(self._path, row))
        shown = " ".join(str(row[k]) for k in KEY if k in row)
        print(f"{shown}: {row['loss']}", flush=True)


def groups(rows: Iterable[dict[str, Any]]) -> dict[tuple[str, ...], list[dict[str, Any]]]:
    """Return the rows by `GROUP`, sorted."""
    found: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(tuple(row[k] for k in GROUP), []).append(row)
    return dict(sorted(found.items()))

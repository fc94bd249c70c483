"""Run: one training run of a comparison, known before anything has run.

    base      common beginning, in BF16; leaves a checkpoint
    measure   one step from that checkpoint that writes statistics; plans are made from them
    branch    a contender, from that checkpoint on

A run's key is its name and a digest of everything that decides its numbers: its settings without
paths, the keys of the runs it needs, and the settings of its plan. Two runs of one key are one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

Kind = Literal["base", "measure", "branch"]

_DIGITS = 10


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        kind: see the file's text.
        name: short, of letters that file names may have.
        values: of `TrainConfig`, without paths.
        base: the run whose checkpoint it starts from; None for a base.
        measurement: the run whose statistics its plan is made from, or None.
        first_step: training steps done before it.
        last_step: training steps done after it.
    """

    kind: Kind
    name: str
    values: Mapping[str, Any] = field(hash=False)
    base: Run | None = None
    measurement: Run | None = None
    first_step: int = 0
    last_step: int = 0

    @cached_property
    def key(self) -> str:
        """Name and digest."""
        content = {
            "kind": self.kind,
            "values": self.values,
            "needs": [run.key for run in self.needs],
            "steps": [self.first_step, self.last_step],
        }
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return f"{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]}"

    @property
    def needs(self) -> tuple[Run, ...]:
        """Runs that must have finished before."""
        return tuple(run for run in (self.base, self.measurement) if run is not None)


@dataclass(frozen=True)
class Entry:
    """A contender's place in a table: one seed of one row.

    Attributes:
        mode: `forks` or `scratch`.
        lowest: lowest format of the table.
        target: share of linear FLOPs in it that is asked for.
        seed: repetition, from 0.
        contender: name.
        run: what gives its numbers; uniform contenders share one over targets.
    """

    mode: str
    lowest: str
    target: float
    seed: int
    contender: str
    run: Run

"""Phases: where a run's wall time went.

    wall     = sum wall_s                 the run, as far as it is recorded
    refresh  = sum refresh_s              passes A and B, and their reduction
    wait     = sum wait_s                 training waits for the solver
    step     = wall - refresh - wait      forward, backward, optimizer; evaluations, checkpoints
    solve    = sum of plans' seconds      beside training, in a process of its own

`run_directory.py` says what is recorded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_snip.reporting.run_record import RunRecord


@dataclass(frozen=True)
class Phases:
    """Seconds of a run.

    Attributes:
        step: training, evaluations and checkpoints included.
        refresh: measuring.
        wait: training waited for the solver.
        solve: the solver worked, beside training.
    """

    step: float
    refresh: float
    wait: float
    solve: float

    @property
    def wall(self) -> float:
        """Seconds in all; the solver's are no part of them."""
        return self.step + self.refresh + self.wait


def phases_of(run: RunRecord) -> Phases | None:
    """Return where the time went, or None where the run has not recorded it."""
    walls = _total(run, "wall_s")
    if walls <= 0.0:
        return None
    refresh, wait = _total(run, "refresh_s"), _total(run, "wait_s")
    solve = sum(span.plan.seconds for span in run.plans if span.plan is not None)
    return Phases(max(0.0, walls - refresh - wait), refresh, wait, solve)


def _total(run: RunRecord, name: str) -> float:
    return float(np.nansum(run.metrics.column(name)[1]))

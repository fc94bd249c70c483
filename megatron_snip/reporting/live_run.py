"""LiveRun: a run whose files grow while somebody watches."""

from __future__ import annotations

from pathlib import Path

from megatron_snip.config import SnipConfig, read_yaml
from megatron_snip.planning.plan import PrecisionPlan, read_plan
from megatron_snip.reporting.metrics_log import MetricsLog, PlanMark
from megatron_snip.reporting.run_record import check_run_directory, planned_steps, snip_config


class LiveRun:
    """A run under way.

    Attributes:
        path: its directory.
        metrics: the steps made so far.
        plan: in force, or None.
        mark: when and how that plan was applied, or None.
    """

    def __init__(self, path: Path) -> None:
        """Open the run.

        Raises:
            UsageError: if it is no run directory.
        """
        check_run_directory(path)
        config = read_yaml(path / "config.yaml")
        self.path = path
        self.metrics = MetricsLog(path / "metrics.jsonl")
        self.plan: PrecisionPlan | None = None
        self.mark: PlanMark | None = None
        self._planned = planned_steps(config)
        self._snip: SnipConfig | None = snip_config(config)

    def refresh(self) -> bool:
        """Read what was added; return whether anything was.

        Raises:
            UsageError: if a file is damaged.
        """
        added = self.metrics.read_more()
        marks = self.metrics.plans if added else []
        if marks and marks[-1] != self.mark:
            self.mark = marks[-1]
            self.plan = read_plan(self.path / "plans" / f"{self.mark.plan_step}.json")
        return added

    @property
    def finished(self) -> bool:
        """Whether the run has made all the steps that its settings ask for."""
        return self._planned is not None and self.metrics.last_step + 1 >= self._planned

    @property
    def total(self) -> int | None:
        """Steps that the run is to make, where its settings say so."""
        return self._planned

    @property
    def lowest_formats(self) -> str:
        """What the low-precision share counts."""
        return "low precision" if self._snip is None else self._snip.lowest_formats

    @property
    def next_refresh(self) -> int | None:
        """The step of the next refresh; None where there will be none."""
        c = self._snip
        if c is None or not c.enabled:
            return None
        step = max(self.metrics.last_step + 1, c.start_step)
        step += -(step - c.start_step) % c.interval
        ends = [end for end in (c.stop_step, self._planned) if end is not None]
        return step if all(step < end for end in ends) else None

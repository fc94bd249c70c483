"""The table at the end of a run: its plans."""

from __future__ import annotations

from rich.table import Table

from megatron_snip.reporting.events import Event, PlanApplied


class SummaryWriter:
    """Collects the plans of a run, for a table at its end."""

    def __init__(self) -> None:
        self._table = Table(title="plans applied", title_justify="left")
        for column in ("iteration", "policy", "status", "efficiency", "target", "changed"):
            justify = "left" if column in ("policy", "status") else "right"
            self._table.add_column(column, justify=justify)  # type: ignore[arg-type]

    def write(self, event: Event) -> None:
        """Add a row for a plan: when, how good, how much changed."""
        if isinstance(event.payload, PlanApplied):
            plan, num_changed = event.payload.plan, event.payload.num_changed
            self._table.add_row(
                str(event.iteration),
                plan.policy,
                plan.status,
                f"{plan.efficiency:.3f}",
                f"{plan.target:.3f}",
                f"{num_changed} of {len(plan.linears)}" if num_changed else "plan unchanged",
            )

    def close(self) -> None:
        """Leave the table as it is."""

    def tables(self) -> list[Table]:
        """Return the table to print, if there were plans."""
        return [self._table] if self._table.row_count else []

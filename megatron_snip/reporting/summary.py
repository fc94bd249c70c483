"""The table at the end of a run: each linear's divergences by option, and what it was given."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from megatron_snip.options import Option
from megatron_snip.reporting.reporter import Applied, Event, Refresh


class SummaryReporter:
    """Keeps the last refresh and the plans' numbers, for a table at the end.

    Attributes:
        refresh: the last measurement, or None.
        applied: every plan applied, in order.
    """

    def __init__(self) -> None:
        self.refresh: Refresh | None = None
        self.applied: list[Applied] = []

    def refreshed(self, refresh: Refresh) -> None:
        """Keep it."""
        self.refresh = refresh

    def planned(self, applied: Applied) -> None:
        """Keep it."""
        self.applied.append(applied)

    def event(self, event: Event) -> None:
        """Nothing: it was logged."""

    def metrics(self, step: int, values: dict[str, Any]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""

    def tables(self) -> list[Table]:
        """Return the tables to print: the plans, and the last divergences."""
        found = []
        if self.applied:
            found.append(plans_table(self.applied))
        if self.refresh is not None:
            found.append(linears_table(self.refresh, self.applied[-1] if self.applied else None))
        return found


def plans_table(applied: list[Applied]) -> Table:
    """Return one row a plan: when, how good, how much changed."""
    table = Table(title="plans applied", title_justify="left")
    for column in ("step", "measured at", "policy", "status", "efficiency", "target", "changed"):
        table.add_column(column, justify="left" if column in ("policy", "status") else "right")
    for entry in applied:
        plan = entry.plan
        table.add_row(
            str(entry.step),
            str(plan.iteration),
            plan.policy,
            plan.status,
            f"{plan.efficiency:.3f}",
            f"{plan.target:.3f}",
            f"{entry.num_changed} of {len(plan.linears)}",
        )
    return table


def linears_table(refresh: Refresh, applied: Applied | None) -> Table:
    """Return one row a linear: share of FLOPs, divergences by uniform option, and the choice.

    Args:
        refresh: the measurement to show.
        applied: the plan whose choice is shown, or None.
    """
    linears = refresh.divergences.linears
    options = [option for option in linears[0].options if len(set(option.formats)) == 1]
    table = Table(
        title=f"loss and weight divergence by option, measured at step {refresh.step}",
        title_justify="left",
    )
    table.add_column("linear", overflow="fold")
    table.add_column("FLOPs", justify="right", no_wrap=True)
    for kind in ("loss", "weight"):
        for option in options:
            table.add_column(f"{kind}\n{option}", justify="right", no_wrap=True)
    table.add_column("plan", no_wrap=True)
    total = sum(linear.statistics.flops_per_token for linear in linears)
    for linear in linears:
        cells = [f"{linear.options[o].loss_divergence:.1e}" for o in options]
        cells += [f"{linear.options[o].weight_divergence:.3f}" for o in options]
        chosen: Option | None = applied.plan.linears[linear.name] if applied else None
        share = f"{100 * linear.statistics.flops_per_token / total:.1f}%"
        table.add_row(linear.name, share, *cells, str(chosen) if chosen else "-")
    return table

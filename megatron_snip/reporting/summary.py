"""The table at the end of a run: each linear's divergences by option, and what it was given."""

from __future__ import annotations

from rich.table import Table

from megatron_snip.reporting.events import Event, Measurement, PlanApplied

LEGEND = (
    "loss: predicted change of the loss. weight: relative change of the next update. "
    "plan: the option chosen."
)


class SummaryWriter:
    """Keeps the last measurement and the plans' numbers, for tables at the end of a run."""

    def __init__(self) -> None:
        self._measured: tuple[int, Measurement] | None = None
        self._applied: list[tuple[int, PlanApplied]] = []

    def write(self, event: Event) -> None:
        """Keep what the tables show."""
        if isinstance(event.payload, Measurement):
            self._measured = event.iteration, event.payload
        elif isinstance(event.payload, PlanApplied):
            self._applied.append((event.iteration, event.payload))

    def close(self) -> None:
        """Keep all."""

    def tables(self) -> list[Table | str]:
        """Return what to print: the plans, the last divergences and their legend."""
        found: list[Table | str] = [plans_table(self._applied)] if self._applied else []
        if self._measured is not None:
            last = self._applied[-1][1] if self._applied else None
            found += [linears_table(*self._measured, last), LEGEND]
        return found


def plans_table(applied: list[tuple[int, PlanApplied]]) -> Table:
    """Return one row a plan: when, how good, how much changed."""
    table = Table(title="plans applied", title_justify="left")
    for column in ("iteration", "policy", "status", "efficiency", "target", "changed"):
        table.add_column(column, justify="left" if column in ("policy", "status") else "right")
    for iteration, entry in applied:
        plan = entry.plan
        changed = f"{entry.num_changed} of {len(plan.linears)}"
        table.add_row(
            str(iteration),
            plan.policy,
            plan.status,
            f"{plan.efficiency:.3f}",
            f"{plan.target:.3f}",
            changed if entry.num_changed else "plan unchanged",
        )
    return table


def linears_table(iteration: int, measured: Measurement, applied: PlanApplied | None) -> Table:
    """Return one row a linear: share of FLOPs, divergences by uniform option, and the choice.

    Args:
        iteration: that was measured.
        measured: the measurement to show.
        applied: the plan whose choice is shown, or None.
    """
    linears = measured.divergences.linears
    options = [option for option in linears[0].options if len(set(option.formats)) == 1]
    title = f"loss and weight divergence by option, measured at iteration {iteration}"
    table = Table(title=title, title_justify="left")
    table.add_column("linear", overflow="fold")
    numbers = [f"{kind}\n{option}" for kind in ("loss", "weight") for option in options]
    for name in ("FLOPs", *numbers, "plan"):
        table.add_column(name, justify="left" if name == "plan" else "right", no_wrap=True)
    total = sum(linear.statistics.flops_per_token for linear in linears)
    for linear in linears:
        cells = [f"{linear.options[o].loss_divergence:.1e}" for o in options]
        cells += [f"{linear.options[o].weight_divergence:.3f}" for o in options]
        chosen = str(applied.plan.linears[linear.name]) if applied else "-"
        share = f"{100 * linear.statistics.flops_per_token / total:.1f}%"
        table.add_row(linear.name, share, *cells, chosen)
    return table

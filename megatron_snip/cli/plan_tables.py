"""Tables of a plan for people: linear by linear, and stage by stage."""

from __future__ import annotations

import sys

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from megatron_snip.options import Option
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.planning.problem import LinearChoices, OptionCost, PlanningProblem

MAX_ROWS = 1500
"""Linears that are listed one by one; larger models are summed up by kind."""


def stage_table(plan: PrecisionPlan, problem: PlanningProblem) -> RichTable:
    """Return what every stage with linears reached."""
    table = RichTable("stage", "linears", "efficiency", "quality loss", box=box.SIMPLE)
    for column in table.columns:
        column.justify = "right"
    for stage, members in _members(problem).items():
        total = sum(_loss(m.options, plan.linears[m.name]) for m in members)
        table.add_row(str(stage), str(len(members)), f"{plan.stages[stage]:.4f}", f"{total:.4g}")
    return table


def stage_efficiencies(plan: PrecisionPlan, problem: PlanningProblem) -> str:
    """Return them in a line; where some stages have no linears the others are named."""
    used = list(_members(problem))
    told = [f"{plan.stages[stage]:.6f}" for stage in used]
    if len(used) < len(plan.stages):
        told = [f"stage {stage}: {text}" for stage, text in zip(used, told, strict=True)]
    return ", ".join(told)


def _members(problem: PlanningProblem) -> dict[int, list[LinearChoices]]:
    """Return the linears of every stage that has any, by stage."""
    members: dict[int, list[LinearChoices]] = {}
    for linear in problem.linears:
        members.setdefault(linear.stage, []).append(linear)
    return dict(sorted(members.items()))


def plain_console(piped_width: int = 1000) -> Console:
    """Return a console that prints text as it is: what comes from files is no markup.

    Args:
        piped_width: characters a line where output is piped; a pipe has no width of its own, and
            names must not be cut there.
    """
    width = None if sys.stdout.isatty() else piped_width
    return Console(width=width, highlight=False, markup=False, emoji=False)


def linear_table(
    plan: PrecisionPlan, problem: PlanningProblem, previous: PrecisionPlan | None
) -> RichTable:
    """Return every linear's option, with what it was before where there is a previous plan."""
    if len(problem.linears) > MAX_ROWS:
        return _kind_table(plan, problem)
    table = RichTable("linear", "stage", "option", box=box.SIMPLE)
    for heading in ("quality loss", "saving", "share of FLOPs"):
        table.add_column(heading, justify="right")
    if previous is not None:
        table.add_column("before")
    total = sum(linear.flops for linear in problem.linears) or 1.0
    for linear in problem.linears:
        option = plan.linears[linear.name]
        cost = _cost(linear.options, option)
        row = [linear.name, str(linear.stage), str(option)]
        row += [f"{_loss(linear.options, option):.4g}", f"{cost.saving:.3g}"]
        row.append(f"{linear.flops / total:.4%}")
        if previous is not None:
            before = previous.linears[linear.name]
            row.append("" if before == option else str(before))
        table.add_row(*row)
    return table


def _kind_table(plan: PrecisionPlan, problem: PlanningProblem) -> RichTable:
    """Count options by kind of linear: what a table of ten thousand rows would not show."""
    counts: dict[str, dict[str, int]] = {}
    for linear in problem.linears:
        by_option = counts.setdefault(linear.name.rsplit(".", 1)[-1], {})
        option = str(plan.linears[linear.name])
        by_option[option] = by_option.get(option, 0) + 1
    options = sorted({option for by_option in counts.values() for option in by_option})
    table = RichTable(f"kind ({len(problem.linears)} linears; --json lists them)", box=box.SIMPLE)
    for option in options:
        table.add_column(option, justify="right")
    for kind, by_option in counts.items():
        table.add_row(kind, *(str(by_option.get(option, 0)) for option in options))
    return table


def _cost(options: dict[str, OptionCost], option: Option) -> OptionCost:
    for name, cost in options.items():
        if Option.parse(name) == option:
            return cost
    return OptionCost(quality_loss=0.0, saving=0.0)  # bf16, which needs no listing


def _loss(options: dict[str, OptionCost], option: Option) -> float:
    loss = _cost(options, option).quality_loss
    assert loss is not None, "plans use no forbidden options"
    return loss

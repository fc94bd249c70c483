"""Ties: linears that must have one option, such as the two of an MLP with fused operations.

The planner sees each group as one linear with the group's FLOPs, quality losses and seconds. It has
the name of the group's first linear; a plan gives its option to all of them.
"""

from collections.abc import Mapping, Sequence

from megatron_snip.errors import UsageError
from megatron_snip.options import BF16, Option
from megatron_snip.planning.problem import LinearChoices, OptionCost, PlanningProblem

TIED = "its operations are fused with those of another linear"
"""Why a linear has the option of another one."""


def merged(problem: PlanningProblem) -> PlanningProblem:
    """Return a problem with one linear for each group of tied linears.

    Raises:
        UsageError: if linears of different stages are tied.
    """
    if not problem.ties:
        return problem
    by_name = {row.name: row for row in problem.linears}
    representative = _representatives(problem)
    groups = {names[0]: [by_name[name] for name in names] for names in problem.ties}
    linears = []
    for row in problem.linears:
        if row.name in groups:
            linears.append(_merged(groups[row.name]))
        elif row.name not in representative:
            linears.append(row)
    return problem.model_copy(update={"linears": tuple(linears), "ties": ()})


def spread(linears: Mapping[str, Option], problem: PlanningProblem) -> dict[str, Option]:
    """Return the options of all linears of a problem, from those of its merged linears."""
    representative = _representatives(problem)
    return {name: linears[representative.get(name, name)] for name in problem.names}


def _representatives(problem: PlanningProblem) -> dict[str, str]:
    """Return, for each tied linear, the first linear of its group."""
    return {name: names[0] for names in problem.ties for name in names}


def _merged(rows: Sequence[LinearChoices]) -> LinearChoices:
    """Return one linear in place of a group of tied ones."""
    if len({row.stage for row in rows}) > 1:
        names = ", ".join(row.name for row in rows)
        raise UsageError(f"tied linears are on different pipeline stages: {names}")
    flops = sum(row.flops for row in rows)
    options = {}
    for text in rows[0].options:
        if all(text in row.options for row in rows):
            options[text] = _sum([row.options[text] for row in rows], rows, flops)
    if not options:  # bf16 changes nothing, so linears without a common option get that
        options[str(BF16)] = OptionCost(quality_loss=0.0, saving=0.0)
    return rows[0].model_copy(update={"flops": flops, "options": options})


def _sum(costs: Sequence[OptionCost], rows: Sequence[LinearChoices], flops: float) -> OptionCost:
    """Return the cost of one option at all linears of a group, which have `flops` together."""
    saved = sum(cost.saving * row.flops for cost, row in zip(costs, rows, strict=True))
    names = [name for name in costs[0].scores if all(name in cost.scores for cost in costs)]
    return OptionCost(
        quality_loss=_total([cost.quality_loss for cost in costs]),
        saving=min(saved / flops, 1.0) if flops else costs[0].saving,
        seconds=_total([cost.seconds for cost in costs]),
        scores={name: _total([cost.scores[name] for cost in costs]) for name in names},
    )


def _total(values: Sequence[float | None]) -> float | None:
    """Return the sum; None if a value is: what one linear cannot run, none of its group can."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None

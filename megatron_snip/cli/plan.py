"""`megatron-snip plan`: make a plan from a problem file.

Exit status: 0 with a plan; 3 if no plan satisfies the constraints (the conflicting ones and the
highest reachable target are named); 2 on bad input.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

from rich.table import Table

from megatron_snip.cli.common import add_examples, console, integer, new_table, write_output
from megatron_snip.cli.planning_flags import (
    INFEASIBLE,
    add_planning_flags,
    problem_from,
    settings_from,
)
from megatron_snip.errors import InfeasiblePlanError, UsageError
from megatron_snip.options import Option
from megatron_snip.planning.plan import PrecisionPlan, read_plan
from megatron_snip.planning.planner import make_plan
from megatron_snip.planning.policies import get_policy
from megatron_snip.planning.problem import (
    LinearChoices,
    OptionCost,
    PlanningProblem,
    check_options,
)
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.reporting.text import percent, quality, seconds

MAX_ROWS = 1500
"""Linears in a table; larger models are summed up by kind."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add_examples(
        parser,
        "megatron-snip plan runs/demo/problems/21.json --target 0.9",
        "megatron-snip plan problem.json --pipeline-balance stage --first-layers 1=bf16 --json",
        "megatron-snip plan problem.json --previous plan.json --output next.json",
    )
    add_planning_flags(parser)
    parser.add_argument("--target", metavar="T", help="least efficiency, 0 to 1 [the problem's]")
    changes = parser.add_argument_group("changes of the current plan")
    changes.add_argument("--previous", metavar="PLAN.json", type=Path, help="the current plan")
    changes.add_argument(
        "--change-penalty", metavar="X", help="quality loss that each changed linear costs [0]"
    )
    parser.add_argument(
        "--iteration", metavar="N", default="0", help="iteration of the statistics [0]"
    )
    parser.add_argument("--output", metavar="FILE", type=Path, help="write the plan to this file")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON, nothing else")


def run(args: argparse.Namespace) -> int:
    """Plan and print; return the exit status.

    Raises:
        UsageError: for bad input.
    """
    settings = _settings(args)
    iteration = integer("--iteration", args.iteration, least=0)
    problem = problem_from(args)
    check_options(problem, f"problem file '{args.problem}'")
    previous = None if args.previous is None else _previous(args.previous, problem)
    try:
        plan = make_plan(problem, settings, previous, iteration)
    except InfeasiblePlanError as error:
        return _infeasible(error, args.json)
    if args.output is not None:
        write_output(args.output, plan.to_json())
    if args.json:
        sys.stdout.write(plan.to_json())
    else:
        _print(plan, problem, settings, previous)
    return 0


def _previous(path: Path, problem: PlanningProblem) -> PrecisionPlan:
    plan = read_plan(path)
    try:
        plan.check_against(problem.names)
    except UsageError as error:
        raise UsageError(f"plan file '{path}': {error}") from None
    return plan


def _settings(args: argparse.Namespace) -> PlanSettings:
    if args.change_penalty is not None and args.previous is None:
        raise UsageError("--change-penalty needs --previous PLAN.json, the current plan")
    settings = settings_from(args, target=args.target, change_penalty=args.change_penalty)
    unused = {
        "--target": args.target,
        "--pipeline-balance": None if args.pipeline_balance == "none" else args.pipeline_balance,
        "--change-penalty": args.change_penalty,
    }
    given = [flag for flag, value in unused.items() if value is not None]
    if given and not get_policy(settings.policy).heeds_target:
        raise UsageError(
            f"policy '{settings.policy}' has no target and does not use {given[0]}; leave that "
            "out, or take another policy (snip, greedy, ...)"
        )
    return settings


def _infeasible(error: InfeasiblePlanError, as_json: bool) -> int:
    if as_json:
        answer = {
            "version": 1,
            "status": "infeasible",
            "conflicts": list(error.conflicts),
            "best_target": error.best_target,
        }
        print(json.dumps(answer, indent=1))
    print(f"megatron-snip plan: {error}", file=sys.stderr)
    return INFEASIBLE


def _print(
    plan: PrecisionPlan,
    problem: PlanningProblem,
    settings: PlanSettings,
    previous: PrecisionPlan | None,
) -> None:
    out = console()
    if len(problem.linears) > MAX_ROWS:
        out.print(_kind_table(plan))
        out.print(f"{len(problem.linears)} linears, counted by kind and option; --json lists them.")
    else:
        out.print(_linear_table(plan, problem, previous))
        out.print(
            "quality loss: predicted harm of the option. saving: share of the linear's FLOPs in "
            "the lowest precision. FLOPs: the linear's share of all FLOPs."
        )
    if problem.num_stages > 1:
        out.print(_stage_table(plan, problem))
    target = f"target {plan.target:g}" if get_policy(plan.policy).heeds_target else "no target"
    for line in (
        f"policy        {plan.policy}, {plan.status}, {seconds(plan.seconds)}",
        f"quality loss  {quality(plan.objective, 6)}, lower bound {quality(plan.bound, 6)}, "
        f"gap {quality(plan.gap, 2)}",
        f"efficiency    {plan.efficiency:.6f} of {settings.cost} ({target})",
        f"digest        {plan.digest}",
    ):
        out.print(line)


def _linear_table(
    plan: PrecisionPlan, problem: PlanningProblem, previous: PrecisionPlan | None
) -> Table:
    text = ("linear", "option") if previous is None else ("linear", "option", "before")
    numbers = ("stage",) if problem.num_stages > 1 else ()
    table = new_table(text, (*numbers, "quality loss", "saving", "FLOPs"))
    total = sum(linear.flops for linear in problem.linears) or 1.0
    for linear in problem.linears:
        option = plan.linears[linear.name]
        cost = _cost(linear, option)
        row = [linear.name, str(option)]
        if previous is not None:
            before = previous.linears[linear.name]
            row.append("" if before == option else str(before))
        row += [str(linear.stage)] * len(numbers)
        row += [quality(cost.quality_loss), f"{cost.saving:.3g}", percent(linear.flops / total)]
        table.add_row(*row)
    return table


def _stage_table(plan: PrecisionPlan, problem: PlanningProblem) -> Table:
    table = new_table((), ("stage", "linears", "efficiency", "quality loss"))
    for stage in sorted({linear.stage for linear in problem.linears}):
        members = [linear for linear in problem.linears if linear.stage == stage]
        loss = sum(_cost(m, plan.linears[m.name]).quality_loss or 0.0 for m in members)
        efficiency = f"{plan.stages[stage]:.4f}"
        table.add_row(str(stage), str(len(members)), efficiency, quality(loss))
    return table


def _kind_table(plan: PrecisionPlan) -> Table:
    counts: dict[str, Counter[str]] = {}
    for name, option in plan.linears.items():
        counts.setdefault(name.rsplit(".", 1)[-1], Counter())[str(option)] += 1
    options = sorted({option for by_option in counts.values() for option in by_option})
    table = new_table(("kind",), tuple(options))
    for kind, by_option in counts.items():
        table.add_row(kind, *(str(by_option[option]) for option in options))
    return table


def _cost(linear: LinearChoices, option: Option) -> OptionCost:
    for name, cost in linear.options.items():
        if Option.parse(name) == option:
            return cost
    return OptionCost(quality_loss=0.0, saving=0.0)  # bf16 need not be listed

"""`megatron-snip plan`: make a plan from a problem file and say how good it is.

Exit status: 0 with a plan; 3 if no plan satisfies the rules, with those of them that conflict
and the best reachable target; 2 on bad input.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from megatron_snip.cli.plan_flags import (
    add_rule_flags,
    flag_of,
    problem_from,
    settings_from,
)
from megatron_snip.cli.plan_tables import (
    linear_table,
    plain_console,
    stage_efficiencies,
    stage_table,
)
from megatron_snip.errors import InfeasiblePlanError, UsageError
from megatron_snip.planning.plan import PrecisionPlan, read_plan, write_plan
from megatron_snip.planning.planner import make_plan
from megatron_snip.planning.policies import get_policy
from megatron_snip.planning.problem import PlanningProblem, check_options
from megatron_snip.planning.settings import PlanSettings

INFEASIBLE = 3
"""Exit status where no plan satisfies the rules."""

MAX_DIGITS = 18
"""Digits of an iteration: a 64-bit integer holds it."""

EXAMPLES = """\
examples:
  megatron-snip plan runs/demo/problems/20.json --target 0.9
  megatron-snip plan problem.json --pipeline-balance stage --first-layers 1=bf16 --json
  megatron-snip plan problem.json --previous plan.json --change-penalty 1e-4 --output next.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    add_rule_flags(parser)
    parser.add_argument("--target", metavar="T", help="least efficiency, 0 to 1 [the problem's]")
    changes = parser.add_argument_group("changes of the current plan")
    changes.add_argument("--previous", metavar="PLAN.json", type=Path, help="the current plan")
    changes.add_argument(
        "--change-penalty", metavar="X", help="quality loss that each changed linear costs [0]"
    )
    parser.add_argument(
        "--iteration", metavar="N", default="0", help="iteration of the statistics [0]"
    )
    parser.add_argument("--output", metavar="FILE", type=Path, help="write the plan here as well")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON, nothing else")


def run(args: argparse.Namespace) -> int:
    """Plan and print; return the exit status.

    Raises:
        UsageError: for bad input.
    """
    settings = _settings(args)
    problem = problem_from(args)
    check_options(problem, f"problem file '{args.problem}'")
    previous = None if args.previous is None else _previous(args.previous, problem)
    try:
        plan = make_plan(problem, settings, previous, _iteration(args.iteration))
    except InfeasiblePlanError as error:
        return _infeasible(error, args.json)
    if args.output is not None:
        _write(plan, args.output)
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
    settings = settings_from(args, target=args.target, change_penalty=args.change_penalty)
    if args.change_penalty is not None and args.previous is None:
        raise UsageError("--change-penalty needs --previous PLAN.json, the current plan")
    _refuse_idle_flags(args, settings)
    return settings


def _refuse_idle_flags(args: argparse.Namespace, settings: PlanSettings) -> None:
    """Refuse flags that the policy has no use for, rather than pass over them in silence."""
    name = settings.policy
    if get_policy(name).heeds_target:
        return
    idle = {
        "target": args.target is not None,
        "pipeline_balance": settings.pipeline_balance != "none",
        "change_penalty": settings.change_penalty > 0.0,
    }
    for field, given in idle.items():
        if given:
            raise UsageError(
                f"policy '{name}' has no target to weigh anything against, so it cannot heed "
                f"{flag_of(field)}; leave that out, or take another policy (snip, greedy, ...)"
            )


def _iteration(text: str) -> int:
    if not text.isdecimal() or len(text) > MAX_DIGITS:
        raise UsageError(
            f"--iteration must be a number of at most {MAX_DIGITS} digits, got {text[:40]!r}"
        )
    return int(text)


def _write(plan: PrecisionPlan, path: Path) -> None:
    try:
        write_plan(plan, path)
    except OSError as error:
        raise UsageError(f"cannot write '{path}': {error.strerror or error}") from None


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
    console = plain_console()
    console.print(linear_table(plan, problem, previous))
    console.print(stage_table(plan, problem))
    for line in _summary(plan, problem, settings):
        console.print(line, markup=False, soft_wrap=True)


def _summary(plan: PrecisionPlan, problem: PlanningProblem, settings: PlanSettings) -> list[str]:
    heeds = get_policy(plan.policy).heeds_target
    target = f"target {plan.target:g}" if heeds else f"{plan.policy} heeds no target"
    objective = "unknown" if plan.objective is None else f"{plan.objective:.6g}"
    bound = "unknown" if plan.bound is None else f"{plan.bound:.6g}"
    gap = "unknown" if plan.gap is None else f"{plan.gap:.2e}"
    return [
        f"policy      {plan.policy}",
        f"status      {plan.status}",
        f"objective   {objective} (quality loss)",
        f"bound       {bound}, gap {gap}",
        f"efficiency  {plan.efficiency:.6f} of {settings.cost} ({target})",
        f"stages      {stage_efficiencies(plan, problem)}",
        f"seconds     {plan.seconds:.3f}",
        f"digest      {plan.digest}",
    ]

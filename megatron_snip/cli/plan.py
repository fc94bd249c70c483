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
    metrics_from,
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
from megatron_snip.planning.planner import PlanReport, make_plan_report
from megatron_snip.planning.policies import get_policy
from megatron_snip.planning.problem import PlanningProblem, check_options
from megatron_snip.planning.settings import PlanSettings

INFEASIBLE = 3
"""Exit status where no plan satisfies the rules."""

MAX_STEP_DIGITS = 18
"""A step is a count: any that a 64-bit integer holds, so that what is written can be read."""

EXAMPLES = """\
examples:
  megatron-snip plan runs/demo/problems/20.json --target 0.9
  megatron-snip plan problem.json --pipeline-balance stage --first-layers 1=bf16 --json
  megatron-snip plan problem.json --previous plan.json --max-changes 10 --output next.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    add_rule_flags(parser)
    parser.add_argument("--target", metavar="T", help="least efficiency, 0 to 1 [the problem's]")
    changes = parser.add_argument_group("changes against a plan in force")
    changes.add_argument("--previous", metavar="PLAN.json", type=Path, help="the plan in force")
    changes.add_argument("--max-changes", metavar="N", help="most linears that may change")
    changes.add_argument(
        "--min-gain", metavar="F", help="share of the quality loss that a change must save"
    )
    parser.add_argument("--step", metavar="N", default="0", help="training step of the plan [0]")
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
        report = make_plan_report(
            problem, settings, previous, _step(args.step), metrics_from(args, settings)
        )
    except InfeasiblePlanError as error:
        return _infeasible(error, args.json)
    if args.output is not None:
        _write(report.plan, args.output)
    if args.json:
        sys.stdout.write(report.plan.to_json())
    else:
        _print(report, problem, settings, previous)
    return 0


def _previous(path: Path, problem: PlanningProblem) -> PrecisionPlan:
    plan = read_plan(path)
    try:
        plan.check_against(problem.names)
    except UsageError as error:
        raise UsageError(f"plan file '{path}': {error}") from None
    return plan


def _settings(args: argparse.Namespace) -> PlanSettings:
    given = {"target": args.target, "max_changes": args.max_changes, "min_gain": args.min_gain}
    settings = settings_from(args, **given)
    for name in ("max_changes", "min_gain"):
        if given[name] is not None and args.previous is None:
            raise UsageError(f"{flag_of(name)} needs --previous PLAN.json, the plan that changes")
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
        "min_gain": settings.min_gain > 0.0,
    }
    for field, given in idle.items():
        if given:
            raise UsageError(
                f"policy '{name}' has no target to weigh anything against, so it cannot heed "
                f"{flag_of(field)}; leave that out, or take another policy (snip, greedy, ...)"
            )


def _step(text: str) -> int:
    if not text.isdecimal() or len(text) > MAX_STEP_DIGITS:
        raise UsageError(
            f"--step must be a number of at least 0 and {MAX_STEP_DIGITS} digits at most, "
            f"got '{text}'"
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
    report: PlanReport,
    problem: PlanningProblem,
    settings: PlanSettings,
    previous: PrecisionPlan | None,
) -> None:
    console = plain_console()
    console.print(linear_table(report.plan, problem, previous))
    console.print(stage_table(report.plan, problem))
    for line in _summary(report, problem, settings):
        console.print(line, markup=False, soft_wrap=True)


def _summary(report: PlanReport, problem: PlanningProblem, settings: PlanSettings) -> list[str]:
    plan = report.plan
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
        f"scaling     integer rounding is off by at most {report.scaling_error:.1e} in quality "
        f"loss, {report.efficiency_error:.1e} in efficiency",
        f"stages      {stage_efficiencies(plan, problem)}",
        f"seconds     {plan.seconds:.3f}",
        f"digest      {plan.digest}",
    ]

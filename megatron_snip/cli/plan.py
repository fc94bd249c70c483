"""`megatron-snip plan`: make a plan from a problem file and say how good it is.

Exit status: 0 with a plan; 3 if no plan satisfies the rules, with the fewest of them that conflict
and the best reachable target; 2 on bad input.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from megatron_snip.cli.plan_flags import add_rule_flags, problem_from, rule_values
from megatron_snip.errors import InfeasiblePlanError, UsageError
from megatron_snip.options import Option
from megatron_snip.planning.metrics import default_statistics, read_metrics
from megatron_snip.planning.plan import PrecisionPlan, read_plan, write_plan
from megatron_snip.planning.planner import PlanReport, make_plan_report
from megatron_snip.planning.policies import Metrics
from megatron_snip.planning.problem import OptionCost, PlanningProblem
from megatron_snip.planning.settings import PlanSettings

INFEASIBLE = 3
"""Exit status where no plan satisfies the rules."""

MAX_ROWS = 1500
"""Linears that are listed one by one; larger models are summed up by kind."""

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
    parser.add_argument(
        "--statistics",
        metavar="FILE",
        type=Path,
        help="a run's divergences/<step>.json, for min-abs-err and min-rel-err [the one beside "
        "the problem]",
    )
    parser.add_argument("--output", metavar="FILE", type=Path, help="write the plan here as well")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON, nothing else")


def run(args: argparse.Namespace) -> int:
    """Plan and print; return the exit status.

    Raises:
        UsageError: for bad input.
    """
    problem = problem_from(args)
    settings = _settings(args)
    previous = None if args.previous is None else read_plan(args.previous)
    try:
        report = make_plan_report(
            problem, settings, previous, _step(args.step), _metrics(args, settings)
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


def _settings(args: argparse.Namespace) -> PlanSettings:
    values = rule_values(args)
    given = {"target": args.target, "max_changes": args.max_changes, "min_gain": args.min_gain}
    for name in ("max_changes", "min_gain"):
        if given[name] is not None and args.previous is None:
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} needs --previous PLAN.json, the plan that changes")
    values.update({name: value for name, value in given.items() if value is not None})
    return PlanSettings.from_dict(values)


def _step(text: str) -> int:
    if not text.isdigit():
        raise UsageError(f"--step must be a number of at least 0, got '{text}'")
    return int(text)


def _metrics(args: argparse.Namespace, settings: PlanSettings) -> Metrics | None:
    path = args.statistics
    if path is None and settings.policy.startswith("min-"):
        path = default_statistics(args.problem)
    return None if path is None else read_metrics(path)


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
    # Piped output has no width of its own; names must not be cut there.
    console = Console(width=None if sys.stdout.isatty() else 1000, highlight=False)
    console.print(_linear_table(report.plan, problem, previous))
    console.print(_stage_table(report.plan, problem))
    for line in _summary(report, settings):
        console.print(line, markup=False, soft_wrap=True)


def _summary(report: PlanReport, settings: PlanSettings) -> list[str]:
    plan = report.plan
    objective = "unknown" if plan.objective is None else f"{plan.objective:.6g}"
    bound = "unknown" if plan.bound is None else f"{plan.bound:.6g}"
    gap = "unknown" if plan.gap is None else f"{plan.gap:.2e}"
    return [
        f"policy      {plan.policy}",
        f"status      {plan.status}",
        f"objective   {objective} (quality loss)",
        f"bound       {bound}, gap {gap}",
        f"efficiency  {plan.efficiency:.6f} of {settings.cost} (target {plan.target:g})",
        f"scaling     integer rounding is off by at most {report.scaling_error:.1e} in quality "
        f"loss, {report.efficiency_error:.1e} in efficiency",
        f"stages      {', '.join(f'{efficiency:.6f}' for efficiency in plan.stages)}",
        f"seconds     {plan.seconds:.3f}",
        f"digest      {plan.digest}",
    ]


def _stage_table(plan: PrecisionPlan, problem: PlanningProblem) -> RichTable:
    table = RichTable("stage", "linears", "efficiency", "quality loss", box=box.SIMPLE)
    for column in table.columns:
        column.justify = "right"
    for stage, efficiency in enumerate(plan.stages):
        members = [linear for linear in problem.linears if linear.stage == stage]
        losses = [_cost(m.options, plan.linears[m.name]).quality_loss for m in members]
        known = [loss for loss in losses if loss is not None]
        total = f"{sum(known):.4g}" if len(known) == len(losses) else "unknown"
        table.add_row(str(stage), str(len(members)), f"{efficiency:.4f}", total)
    return table


def _linear_table(
    plan: PrecisionPlan, problem: PlanningProblem, previous: PrecisionPlan | None
) -> RichTable:
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
        loss = "unknown" if cost.quality_loss is None else f"{cost.quality_loss:.4g}"
        row = [linear.name, str(linear.stage), str(option), loss, f"{cost.saving:.3g}"]
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

"""`megatron-snip diff`: what changed between two plans, by how much of the FLOPs, and why."""

import argparse
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from megatron_snip.cli.common import new_table
from megatron_snip.directory import directory_of
from megatron_snip.errors import UsageError
from megatron_snip.output import console
from megatron_snip.planning.plan import PrecisionPlan, changed_linears, read_plan
from megatron_snip.planning.problem import PlanningProblem, read_problem
from megatron_snip.reporting.run_record import read_run
from megatron_snip.reporting.text import number, percent

EXAMPLES = (
    "megatron-snip diff runs/demo/plans/21.json runs/demo/plans/41.json",
    "megatron-snip diff runs/a runs/b",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    text = "a plan (plans/<iteration>.json), or a run's directory: its last plan"
    parser.add_argument("before", metavar="A", type=Path, help=text)
    parser.add_argument("after", metavar="B", type=Path, help=text)
    parser.add_argument("--json", action="store_true", help="print the changes as JSON, only")


@dataclass(frozen=True)
class Change:
    """A linear with another option.

    Attributes:
        linear: its name.
        before: its option in the first plan.
        after: its option in the second plan.
        share: its share of all FLOPs; None if no problem is known.
        loss_before: quality losses (of the first plan's option, of the second's) by the problem of
            the first plan; None where they are not known.
        loss_after: the same by the problem of the second plan.
    """

    linear: str
    before: str
    after: str
    share: float | None
    loss_before: tuple[float | None, float | None]
    loss_after: tuple[float | None, float | None]


def run(args: argparse.Namespace) -> int:
    """Print what changed; return 0.

    Raises:
        UsageError: for bad input, or plans of different models.
    """
    before, then = _plan_and_problem(args.before)
    after, now = _plan_and_problem(args.after)
    try:
        after.check_against(before.linears)
    except UsageError as error:
        raise UsageError(f"'{args.before}' and '{args.after}' are of two models: {error}") from None
    changes = changes_between(before, after, then, now)
    if args.json:
        print(json.dumps([vars(change) for change in changes], indent=1))
        return 0
    _print(before, after, changes)
    return 0


def changes_between(
    before: PrecisionPlan,
    after: PrecisionPlan,
    then: PlanningProblem | None = None,
    now: PlanningProblem | None = None,
) -> list[Change]:
    """Return the linears whose option differs, in the model's order.

    Args:
        before: the first plan.
        after: the second plan, of the same linears.
        then: the problem of the first plan, or None.
        now: the problem of the second plan, or None.
    """
    problem = now or then
    flops = {} if problem is None else {row.name: row.flops for row in problem.linears}
    total = sum(flops.values())
    changed = set(changed_linears(before, after))
    found = []
    for name in before.linears:
        if name not in changed:
            continue
        options = (str(before.linears[name]), str(after.linears[name]))
        share = flops[name] / total if total and name in flops else None
        losses = [_losses(problem, name, options) for problem in (then, now)]
        found.append(Change(name, *options, share, losses[0], losses[1]))
    return found


def _losses(
    problem: PlanningProblem | None, name: str, options: tuple[str, str]
) -> tuple[float | None, float | None]:
    """Return the quality loss of two options of a linear; None where a problem has none."""
    rows = () if problem is None else problem.linears
    known = {row.name: row.options for row in rows}.get(name, {})
    losses = [known[option].quality_loss if option in known else None for option in options]
    return losses[0], losses[1]


def _plan_and_problem(path: Path) -> tuple[PrecisionPlan, PlanningProblem | None]:
    """Return a plan and the problem that it was made from, where that is known."""
    if path.is_dir():
        spans = read_run(path).plans
        if not spans:
            raise UsageError(f"'{path}' has no plan yet")
        plan = spans[-1].plan
        folder = path
    else:
        plan = read_plan(path)
        folder = directory_of(path)
    problem = folder / "problems" / f"{plan.iteration}.json"
    return plan, read_problem(problem) if problem.is_file() else None


def _print(before: PrecisionPlan, after: PrecisionPlan, changes: list[Change]) -> None:
    out = console()
    out.print(f"A  {before.label}, efficiency {before.efficiency:.4f}", markup=False)
    out.print(f"B  {after.label}, efficiency {after.efficiency:.4f}", markup=False)
    if not changes:
        out.print("every linear has the same option")
        return
    shares = [change.share for change in changes if change.share is not None]
    moved = f", {percent(sum(shares))} of the FLOPs" if shares else ""
    out.print(f"{len(changes)} of {len(after.linears)} linears changed{moved}")
    by_kind: dict[tuple[str, str], list[Change]] = defaultdict(list)
    for change in changes:
        by_kind[change.before, change.after].append(change)
    for (old, new), members in by_kind.items():
        out.print(f"{old} -> {new}: {len(members)} linears", markup=False)
        table = new_table(("linear",), ("FLOPs", "A then", "B then", "A now", "B now"))
        for change in members:
            losses = (*change.loss_before, *change.loss_after)
            table.add_row(change.linear, percent(change.share), *map(number, losses))
        out.print(table)
    out.print(
        "A, B: quality loss of the linear's option in each plan. then, now: by the measurement "
        "from which A and B were made."
    )

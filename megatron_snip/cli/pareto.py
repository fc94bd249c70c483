"""`megatron-snip pareto`: the frontier of quality loss against efficiency.

Exit status: 0 if some target can be reached, 3 if none can, 2 on bad input.
"""

import argparse
import json
from collections import Counter
from decimal import Decimal
from typing import Any

from rich.table import Table

from megatron_snip.cli.common import new_table, progress
from megatron_snip.cli.plan import INFEASIBLE, add_planning_flags, inputs_from
from megatron_snip.errors import UsageError, naming_field
from megatron_snip.output import console
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.planning.planner import frontier
from megatron_snip.planning.policies import get_policy
from megatron_snip.reporting.text import SOLVER_NOISE, column
from megatron_snip.target_schedule import parse_points

EXAMPLES = ("megatron-snip pareto runs/demo/problems/21.json --targets 0.5:1:0.1",)

MAX_TARGETS = 10_001


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add_planning_flags(parser)
    text = "targets: FROM:TO:STEP, a list 0.5,0.75, or a target schedule 0:0,200:0.75 [0:1:0.05]"
    parser.add_argument("--targets", metavar="FROM:TO:STEP", default="0:1:0.05", help=text)
    parser.add_argument("--json", action="store_true", help="print the points as JSON, only")


def run(args: argparse.Namespace) -> int:
    """Solve all targets and print; return the exit status.

    Raises:
        UsageError: for bad input.
    """
    problem, settings = inputs_from(args)
    targets = parse_targets(args.targets)
    if not get_policy(settings.policy).heeds_target:
        raise UsageError(f"policy '{settings.policy}' has no target and so no frontier; take snip")
    with progress("solving") as done:
        points = frontier(problem, settings, targets, done)
    if args.json:
        records = [_record(target, plan) for target, plan in points.items()]
        print(json.dumps(records, indent=1))
    else:
        out = console()
        out.print(_table(points))
        out.print(
            "quality loss: the plan's predicted harm to training: 0 is no harm, about 1 that of "
            "the lowest precision in every linear. gap: proven distance from the optimum. "
            "Columns of options count the linears that have the option. solver: in seconds."
        )
    return 0 if any(points.values()) else INFEASIBLE


def parse_targets(text: str) -> list[float]:
    """Read FROM:TO:STEP (both ends included), a comma-separated list, or a target schedule.

    Decimal arithmetic: 0:1:0.05 gives 0.15 and not 0.15000000000000002.

    Raises:
        UsageError: if the text has another form, or a target is outside [0, 1].
    """
    wanted = f"--targets: '{text}' is not FROM:TO:STEP (0:1:0.05) or a list (0.5,0.75)"
    if ":" in text and "," in text:
        with naming_field("--targets"):
            return [point.target for point in parse_points(text.split(","))]
    try:
        parts = [Decimal(part) for part in text.replace(":", ",").split(",")]
        if ":" in text:
            start, stop, step = parts
            count = int((stop - start) / step) + 1
            if step <= 0 or not 0 < count < MAX_TARGETS:
                raise UsageError(f"{wanted}, with TO not below FROM and 10000 steps at most")
            parts = [start + k * step for k in range(count)]
    except (ArithmeticError, ValueError):  # no number, infinite, or not three of them
        raise UsageError(wanted) from None
    outside = [part for part in parts if part.is_nan() or not 0 <= part <= 1]
    if outside:
        raise UsageError(f"--targets: {outside[0]} is outside [0, 1]")
    return [float(part) for part in parts]


def _record(target: float, plan: PrecisionPlan | None) -> dict[str, Any]:
    """Return a point as a JSON object; null where no plan reaches the target."""
    names = ("objective", "bound", "efficiency", "seconds")
    return {
        "target": target,
        "status": "infeasible" if plan is None else plan.status,
        **{name: getattr(plan, name, None) for name in names},
        "options": dict(sorted(_options(plan).items())),
        "gap": getattr(plan, "gap", None),
    }


def _options(plan: PrecisionPlan | None) -> Counter[str]:
    """Count the linears with each option."""
    return Counter(() if plan is None else map(str, plan.linears.values()))


def _table(points: dict[float, PrecisionPlan | None]) -> Table:
    used: set[str] = set()
    for plan in points.values():
        used |= _options(plan).keys()
    options = sorted(used)
    table = new_table((), ("target", "efficiency", "quality loss", "gap", *options, "solver"))
    decimals = max(len(f"{target:g}".partition(".")[2]) for target in points)  # of any target
    losses = column([getattr(plan, "objective", None) for plan in points.values()], SOLVER_NOISE)
    gaps = column([getattr(plan, "gap", None) for plan in points.values()], SOLVER_NOISE)
    for (target, plan), loss, gap in zip(points.items(), losses, gaps, strict=True):
        cells = ["infeasible"]
        if plan is not None:
            counts = [str(_options(plan)[name]) for name in options]
            cells = [f"{plan.efficiency:.4f}", loss, gap, *counts, f"{plan.seconds:.3f}"]
        table.add_row(f"{target:.{decimals}f}", *cells)
    return table

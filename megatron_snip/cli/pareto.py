"""`megatron-snip pareto`: the frontier of quality loss against efficiency.

Exit status: 0 if some target can be reached, 3 if none can, 2 on bad input.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
from dataclasses import asdict
from decimal import Context, Decimal, InvalidOperation, localcontext
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table as RichTable

from megatron_snip.cli.plan_flags import (
    add_rule_flags,
    problem_from,
    settings_from,
)
from megatron_snip.cli.plan_tables import plain_console
from megatron_snip.errors import UsageError
from megatron_snip.files import write_atomic
from megatron_snip.planning.pareto import ParetoPoint, frontier
from megatron_snip.planning.policies import get_policy
from megatron_snip.planning.settings import PlanSettings

INFEASIBLE = 3
MAX_TARGETS = 10_001
FIELDS = ("target", "status", "objective", "bound", "gap", "efficiency", "seconds")
"""Columns of the CSV, before one column an option with the number of linears that take it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add_rule_flags(parser)
    parser.add_argument(
        "--targets",
        metavar="FROM:TO:STEP",
        default="0:1:0.05",
        help="efficiency targets, both ends included, or a list 0.5,0.75 [0:1:0.05]",
    )
    parser.add_argument("--csv", metavar="FILE", type=Path, help="write the points as CSV")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="write a plot (PNG, SVG, PDF)")
    parser.add_argument("--json", action="store_true", help="print the points as JSON, only")


def run(args: argparse.Namespace) -> int:
    """Solve all targets, print and write; return the exit status.

    Raises:
        UsageError: for bad input, an output that cannot be written, or a missing matplotlib.
    """
    settings = settings_from(args)
    targets = parse_targets(args.targets)
    if not get_policy(settings.policy).heeds_target:
        raise UsageError(
            f"policy '{settings.policy}' heeds no target, so it has no frontier; snip or greedy has"
        )
    if args.plot is not None:
        _pyplot()  # say that it is missing before the work, not after it
    points = frontier(problem_from(args), settings, targets)
    if args.csv is not None:
        _write(args.csv, to_csv(points))
    if args.plot is not None:
        _plot(args.plot, points, settings)
    if args.json:
        print(json.dumps([_plain(point) for point in points], indent=1))
    else:
        console = plain_console()
        console.print(_table(points))
    return 0 if any(point.status is not None for point in points) else INFEASIBLE


def parse_targets(text: str) -> list[float]:
    """Read FROM:TO:STEP (both ends included) or a comma-separated list.

    Decimal arithmetic, so that 0:1:0.05 gives 0.15 and not 0.15000000000000002.

    Raises:
        UsageError: if the text has another form, or a target is outside [0, 1].
    """
    wanted = f"--targets: '{text}' is not FROM:TO:STEP (0:1:0.05) or a list (0.5,0.75)"
    try:
        parts = [Decimal(part) for part in text.replace(":", ",").split(",")]
    except InvalidOperation:
        raise UsageError(wanted) from None
    if not all(part.is_finite() for part in parts):
        raise UsageError(wanted)
    if ":" in text:
        if len(parts) != 3 or text.count(":") != 2:
            raise UsageError(wanted)
        start, stop, step = parts
        with localcontext(Context(traps=[])):  # the quotient may be infinite
            too_many = step <= 0 or stop < start or not (stop - start) / step < MAX_TARGETS
        if too_many:
            raise UsageError(f"{wanted}, with STEP above 0, TO not below FROM, 10000 steps at most")
        parts = [start + k * step for k in range(int((stop - start) / step) + 1)]
    outside = [part for part in parts if not 0 <= part <= 1]
    if outside:
        raise UsageError(f"--targets: {outside[0]} is outside [0, 1]")
    return [float(part) for part in parts]


def to_csv(points: list[ParetoPoint]) -> str:
    """Return the points as CSV; numbers that do not exist are empty."""
    options = sorted({name for point in points for name in point.options})
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([*FIELDS, *options])
    for point in points:
        values = [getattr(point, field) for field in FIELDS]
        if point.status is None:
            values[1] = "infeasible"
        counts = [point.options.get(name, 0) for name in options]
        writer.writerow(["" if value is None else value for value in values] + counts)
    return stream.getvalue()


def _plain(point: ParetoPoint) -> dict[str, Any]:
    values = asdict(point) | {"gap": point.gap}
    values["status"] = point.status or "infeasible"
    return values


def _table(points: list[ParetoPoint]) -> RichTable:
    options = sorted({name for point in points for name in point.options})
    table = RichTable(box=box.SIMPLE)
    for heading in ("target", "status", "quality loss", "gap", "efficiency", "seconds", *options):
        table.add_column(heading, justify="right")
    for point in points:
        if point.status is None:
            table.add_row(f"{point.target:g}", "infeasible", "", "", "", f"{point.seconds:.2f}")
            continue
        table.add_row(
            f"{point.target:g}",
            point.status,
            f"{point.objective:.6g}",
            "" if point.gap is None else f"{point.gap:.1e}",
            f"{point.efficiency:.4f}",
            f"{point.seconds:.2f}",
            *(str(point.options.get(name, 0)) for name in options),
        )
    return table


def _write(path: Path, text: str) -> None:
    try:
        write_atomic(path, text)
    except OSError as error:
        raise UsageError(f"cannot write '{path}': {error.strerror or error}") from None


def _pyplot() -> Any:
    try:
        import matplotlib  # heavy and optional: only a plot needs it
    except ImportError:
        raise UsageError(
            "--plot needs matplotlib: pip install 'megatron-snip[report]', or use --csv"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot  # after the backend is chosen

    return pyplot


def _plot(path: Path, points: list[ParetoPoint], settings: PlanSettings) -> None:
    pyplot = _pyplot()
    reached = [point for point in points if point.status is not None]
    figure, axes = pyplot.subplots(figsize=(6.4, 4.0), layout="constrained")
    efficiencies = [point.efficiency for point in reached]
    axes.plot(efficiencies, [point.objective for point in reached], "o-", label=settings.policy)
    bounded = [point for point in reached if point.bound is not None]
    axes.plot(
        [point.efficiency for point in bounded],
        [point.bound for point in bounded],
        "_",
        color="gray",
        label="lower bound",
    )
    axes.set_xlabel(f"efficiency ({settings.cost})")
    axes.set_ylabel("quality loss")
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:  # ValueError: an ending that matplotlib does not know
        raise UsageError(f"cannot write '{path}': {error}") from None
    finally:
        pyplot.close(figure)

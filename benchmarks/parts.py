"""What each part of a model costs over a whole run, by brute force, and what a plan could leave.

    python -m benchmarks.parts COMPARISON.json [--statistics DIVERGENCES.json] [--output FILE]

COMPARISON.json is what `megatron-snip compare --config configs/compare-warm.yaml --policies
bf16,fp8,low-fprop,low-dgrad,low-wgrad,low-fprop-but-0,...` wrote: runs with one GEMM of every
linear in the lowest format and the others in FP8, and runs with the fprop of all linears in it but
for one layer or one kind of linear. Gaps to BF16 at the end of the run then say

    cost of a GEMM             its gap - gap of `fp8`
    cost of fprop by layer     gap of `low-fprop` - gap of `low-fprop-but-LAYER`; by kind likewise

and, with fprop's cost split as (share of the layer) x (share of the kind), dgrad's and wgrad's
split by FLOPs, and all of them and FP8's gap taken to add up, the least gap that a plan can leave:
the cheapest GEMMs (or whole linears) are put into the lowest format until the target is reached,
the last in part. That is a bound for plans if these costs are right and add up, not a plan.

With the statistics of a refresh, the shares that SNIP's loss divergence predicts stand beside.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_snip.errors import UsageError
from megatron_snip.options import Option
from megatron_snip.planning.json_file import write_atomic
from megatron_snip.reporting.linear_grid import make_grid
from megatron_snip.trainer.config import make_train_config
from megatron_snip.trainer.sizes import linear_shapes

Costs = dict[str, float]
GEMMS = ("fprop", "dgrad", "wgrad")
GENTLE = "fp8"
WITHOUT = "low-fprop-but-"


def gaps_of(comparison: Mapping[str, Any]) -> Costs:
    """Return each contender's gap to BF16, in nats; those that are not finite are left out.

    Raises:
        UsageError: if the file does not hold one table with the runs that this takes.
    """
    if len(comparison["tables"]) != 1:
        raise UsageError(f"one table is wanted, got {len(comparison['tables'])}")
    rows = comparison["tables"][0]["rows"]
    gaps = {r["contender"]: r["gap"]["mean"] for r in rows if r["gap"]["mean"] is not None}
    missing = [name for name in (GENTLE, *map(_low, GEMMS)) if name not in gaps]
    if missing:
        raise UsageError(f"the comparison has no '{missing[0]}'; it has {', '.join(gaps)}")
    return gaps


def fprop_costs(gaps: Mapping[str, float], names: Sequence[str]) -> Costs:
    """Return fprop's cost by layer ("0", "1", ...) or by kind ("qkv", ...), in nats.

    Raises:
        UsageError: if the run without one of them is missing.
    """
    missing = [name for name in names if WITHOUT + name not in gaps]
    if missing:
        raise UsageError(f"the comparison has no '{WITHOUT}{missing[0]}'")
    return {name: gaps["low-fprop"] - gaps[WITHOUT + name] for name in names}


def shares(costs: Mapping[str, float]) -> Costs:
    """Return costs over their sum; what came out negative counts as nothing.

    Raises:
        UsageError: if nothing costs anything.
    """
    positive = {name: max(0.0, cost) for name, cost in costs.items()}
    total = sum(positive.values())
    if total == 0:
        raise UsageError(f"none of {', '.join(costs)} costs anything; there is nothing to share")
    return {name: cost / total for name, cost in positive.items()}


def least_gap(pieces: Sequence[tuple[float, float]], target: float) -> float:
    """Return the least cost of putting `target` of all FLOPs into the lowest format.

    Args:
        pieces: (cost, FLOPs) of what can be chosen, each to any part.
        target: share of the FLOPs, 0 to 1.
    """
    left = target * sum(flops for _, flops in pieces)
    cost = 0.0
    for piece, flops in sorted(pieces, key=lambda each: each[0] / each[1]):
        taken = flops if piece < 0 else min(flops, max(0.0, left))
        cost += piece * taken / flops
        left -= taken
    return cost


def predicted_shares(divergences: Mapping[str, Any], lowest: str) -> tuple[Costs, Costs]:
    """Return the shares of SNIP's loss divergence by layer and by kind of linear."""
    option = str(Option.uniform(lowest))
    rows = {r["name"]: r["options"][option]["loss_divergence"] for r in divergences["linears"]}
    grid = make_grid(rows)
    by_layer, by_kind = dict.fromkeys(grid.rows, 0.0), dict.fromkeys(grid.columns, 0.0)
    for name, (layer, kind) in grid.places.items():
        by_layer[grid.rows[layer]] += rows[name]
        by_kind[grid.columns[kind]] += rows[name]
    return shares(by_layer), shares(by_kind)


def parts_of(
    comparison: Mapping[str, Any], divergences: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return all of it as plain types; losses in nats.

    Raises:
        UsageError: if the comparison lacks a run.
    """
    gaps, table = gaps_of(comparison), comparison["tables"][0]
    shapes = linear_shapes(make_train_config(comparison["settings"]["train"]))
    grid = make_grid(shape.name for shape in shapes)
    layers, kinds = fprop_costs(gaps, grid.rows), fprop_costs(gaps, grid.columns)
    of_layer, of_kind = shares(layers), shares(kinds)
    total = sum(shape.flops_per_token for shape in shapes)
    of_gemm = {gemm: gaps[_low(gemm)] - gaps[GENTLE] for gemm in GEMMS}
    by_gemm, by_linear = [], []
    for shape in shapes:
        layer, kind = grid.places[shape.name]
        flops = shape.flops_per_token / total
        share = of_layer[grid.rows[layer]] * of_kind[grid.columns[kind]]
        costs = (share * of_gemm["fprop"], flops * of_gemm["dgrad"], flops * of_gemm["wgrad"])
        by_gemm += [(cost, flops / 3) for cost in costs]
        by_linear.append((sum(costs), flops))
    predicted = None if divergences is None else predicted_shares(divergences, table["lowest"])
    return {
        **{key: comparison[key] for key in ("machine", "commit")},
        "lowest": table["lowest"],
        "target": table["target"],
        "gaps": gaps,
        "seeds": {r["contender"]: r["seeds"] for r in table["rows"]},
        "costs": of_gemm,
        "fprop_by_layer": layers,
        "fprop_by_kind": kinds,
        "predicted_by_layer": predicted and predicted[0],
        "predicted_by_kind": predicted and predicted[1],
        "least_gap_by_linear": gaps[GENTLE] + least_gap(by_linear, table["target"]),
        "least_gap_by_gemm": gaps[GENTLE] + least_gap(by_gemm, table["target"]),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print, and write if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("comparison", type=Path, metavar="COMPARISON.json")
    parser.add_argument(
        "--statistics", type=Path, metavar="FILE", help="a run's divergences/<step>.json"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the numbers as JSON")
    args = parser.parse_args(argv)
    files = (args.comparison, args.statistics)
    try:
        parts = parts_of(*(None if p is None else json.loads(p.read_text()) for p in files))
    except (OSError, ValueError, UsageError) as error:
        parser.error(str(error))
    _print(parts)
    if args.output is not None:
        write_atomic(args.output, json.dumps(parts, indent=1) + "\n")
    return 0


def _low(gemm: str) -> str:
    """Return the contender that has one GEMM in the lowest format."""
    return f"low-{gemm}"


def _print(parts: Mapping[str, Any]) -> None:
    table = Table("part", "cost, 1e-3", "share", "predicted share")
    for gemm in GEMMS:
        table.add_row(f"{gemm} of all linears", f"{1e3 * parts['costs'][gemm]:.1f}")
    for what in ("layer", "kind"):
        costs, predicted = parts[f"fprop_by_{what}"], parts[f"predicted_by_{what}"]
        for name, share in shares(costs).items():
            cells = [f"fprop of {what} {name}", f"{1e3 * costs[name]:.1f}", f"{share:.2f}"]
            known = predicted is not None and name in predicted
            table.add_row(*cells, f"{predicted[name]:.2f}" if known else "")
    console = Console()
    console.print(table)
    for how in ("linear", "gemm"):
        console.print(
            f"No plan by {how} that puts {100 * parts['target']:g} % of the FLOPs into "
            f"{parts['lowest']} leaves less than {1e3 * parts[f'least_gap_by_{how}']:.1f} "
            "under these costs."
        )


if __name__ == "__main__":
    raise SystemExit(main())

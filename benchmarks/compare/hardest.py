"""Do baselines collapse where SNIP does not? All policies in the hardest cell of the screening.

Preregistered in docs/preregistration.md, "The hardest cell": a run of the cell trains a third of
its iterations in BF16; from there each branch keeps the cell's schedule under its own plan. So the
BF16 branch of seed 0 is the cell's BF16 run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.compare import analysis, collapse
from benchmarks.compare.collapse import CELLS, DIVERGED, LOSES, Cell
from benchmarks.compare.policies import run_branches, saved_model
from benchmarks.compare.runs import Setup, warm_model
from benchmarks.compare.store import ResultStore
from benchmarks.compare.variants import RULES
from benchmarks.machine import RESULTS, read_rows
from megatron_snip.errors import UsageError

TARGETS = (0.75, 0.8)
SEEDS = range(6)
PAPER = "snip-paper"
OURS = ("snip-linear", "snip-gemm", "replan")
BASELINES = ("random", "min-abs-err", "min-rel-err", "layer-type", "layer-id")
"""Those of the paper."""

VARIANTS = (PAPER, *BASELINES, *OURS, *(name for name in RULES if name not in BASELINES))
MOST_SEEDS, MOST_BASELINES = 4, 3
"""A policy collapses if this many seeds do; the paper is reproduced if this many baselines do."""

LEVEL = 0.05


def setup_of(cell: Cell) -> Setup:
    """Return the runs of a cell, from a checkpoint after a third of its iterations."""
    warm = cell.iterations // 3

    def prepare(lab: Any) -> None:
        if cell.hot != 1.0:
            collapse.make_hot(lab, cell.hot)

    return Setup(
        {**collapse.MODEL, **cell.model},
        warm,
        cell.iterations - warm,
        held_out=collapse.HELD_OUT,
        own_schedule=True,
        prepare=prepare,
    )


def keys_of(name: str, seed: int) -> list[dict[str, Any]]:
    """Return the keys of the rows of a seed, in their order."""
    low = CELLS[name].low
    place = {"kind": "hardest", "setup": name, "scenario": "plain", "low": low}
    place |= {"seed": seed, "data_seed": 0}
    branches = [(variant, 0.0) for variant in ("bf16", "uniform-fp8", f"uniform-{low}")]
    branches += [(variant, target) for target in TARGETS for variant in VARIANTS]
    return [{**place, "variant": variant, "target": target} for variant, target in branches]


def cell_of(rows: Sequence[Mapping[str, Any]], screening: Sequence[dict[str, Any]]) -> str:
    """Return the cell: that of the rows, else the hardest of the screening.

    Raises:
        UsageError: if the screening found none.
    """
    name = rows[0]["setup"] if rows else collapse.hardest(collapse.findings(screening))
    if name is None:
        raise UsageError("no cell of the screening is hard and can be planned; see `collapse`")
    return str(name)


def run_hardest(store: ResultStore, options: argparse.Namespace) -> None:
    """Make the rows that are missing, seed by seed, until `options.hours` of a core are used.

    Raises:
        UsageError: if there is no such cell, or rows of a seed come from another warm model.
    """
    end = time.process_time() + 3600 * options.hours

    def goes_on() -> bool:
        return time.process_time() < end

    name = cell_of(store.rows, read_rows(RESULTS / "collapse.jsonl"))
    with collapse.extra_formats():
        for seed in SEEDS:
            keys = [key for key in keys_of(name, seed) if not store.has(key)]
            if not keys or not goes_on():
                continue
            saved = saved_model(options, f"cell-{name}", seed)
            with warm_model(setup_of(CELLS[name]), seed, 1, "plain", saved) as warm:
                place = {k: keys[0][k] for k in ("kind", "setup", "seed")}
                store.check_start(place, warm.digest)
                run_branches(store, warm, keys, goes_on)


def gaps(rows: Sequence[Mapping[str, Any]], key: str = "loss") -> dict[tuple[str, float], dict]:
    """Return {(variant, target): {seed: gap to BF16 in nat}}; DIVERGED at most.

    A branch whose loss is not finite has the gap DIVERGED.
    """
    bf16 = {row["seed"]: row[key] for row in rows if row["variant"] == "bf16"}
    found: dict[tuple[str, float], dict[int, float]] = {}
    for row in rows:
        base = bf16.get(row["seed"])
        if row["variant"] != "bf16" and base is not None:
            gap = DIVERGED if row[key] is None else min(row[key] - base, DIVERGED)
            found.setdefault((row["variant"], row["target"]), {})[row["seed"]] = gap
    return found


def num_collapsed(gap_of_seed: Mapping[int, float]) -> int:
    """Return how many seeds lost more than LOSES."""
    return sum(gap > LOSES for gap in gap_of_seed.values())


def better_than(
    found: Mapping[tuple[str, float], Mapping[int, float]], snip: str, target: float
) -> list[str]:
    """Return the paper's baselines that lose significantly more than a variant of SNIP.

    A paired t-test for each, two-sided, at LEVEL, corrected for their number (Holm).
    """
    ours = found[snip, target]
    p = {}
    larger = {}
    for name in BASELINES:
        differences = [gap - ours[seed] for seed, gap in found[name, target].items()]
        value = float(stats.ttest_1samp(differences, 0.0).pvalue)
        p[name] = 1.0 if np.isnan(value) else value  # all differences are equal
        larger[name] = float(np.mean(differences)) > 0
    rejected: list[str] = []
    for k, name in enumerate(sorted(p, key=lambda name: p[name])):
        if p[name] * (len(p) - k) >= LEVEL:
            break
        rejected.append(name)
    return [name for name in rejected if larger[name]]


def verdict(rows: Sequence[Mapping[str, Any]], snip: str = PAPER) -> str:
    """Return `reproduced`, `in part` or `not reproduced`, for one variant of SNIP.

    Reproduced: at a target MOST_BASELINES of the paper's baselines collapse, and SNIP does not. In
    part: at a target SNIP loses significantly less than MOST_BASELINES of them.
    """
    found = gaps(rows)
    is_better = False
    for target in TARGETS:
        collapsed = [name for name in BASELINES if num_collapsed(found[name, target]) >= MOST_SEEDS]
        if len(collapsed) >= MOST_BASELINES and num_collapsed(found[snip, target]) < MOST_SEEDS:
            return "reproduced"
        is_better |= len(better_than(found, snip, target)) >= MOST_BASELINES
    return "in part" if is_better else "not reproduced"


def hardest_report(rows: Sequence[dict[str, Any]]) -> str:
    """Return the verdicts and the table; before all rows are there, only how many."""
    if not rows:
        return "no rows"
    name = rows[0]["setup"]
    num_wanted = len(keys_of(name, 0)) * len(SEEDS)
    if len(rows) < num_wanted:
        return f"{name}: {len(rows)} of {num_wanted} rows; losses are shown when all are made"
    lines = []
    for snip in (PAPER, *OURS):
        lines.append(f"- {snip} against the paper's baselines: {verdict(rows, snip)}")
    found = gaps(rows)
    in_bf16 = gaps(rows, "loss_bf16")
    table = []
    for (variant, target), values in sorted(found.items(), key=lambda item: item[0][1]):
        base = found.get((PAPER, target), {})
        against = [analysis.MILLI * (gap - base[seed]) for seed, gap in values.items()
                   if variant != PAPER and seed in base]  # fmt: skip
        cells = [variant, f"{target:g}" if target else "", f"{num_collapsed(values)}"]
        cells.append(str(analysis.mean_of([1e3 * gap for gap in values.values()])))
        cells.append(str(analysis.mean_of([1e3 * g for g in in_bf16[variant, target].values()])))
        cells.append(str(analysis.mean_of(against)) if against else "")
        cells.append(analysis.p_text(against) if against else "")
        table.append(cells)
    head = ("variant", "target", f"seeds over {LOSES} nat", "gap, 1e-3 nat", "evaluated in BF16")
    texts = [f"hardest cell: {name}", "\n".join(lines)]
    texts.append(analysis.markdown((*head, f"over {PAPER}", "p"), table))
    return "\n\n".join(texts)

"""Do baselines collapse where SNIP does not? All policies in the hardest cell of the screening.

Preregistered in docs/preregistration.md, "The hardest cell". The runs are made at the tag
`variants.TAG`, which measures products.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.compare import analysis
from benchmarks.compare.collapse import CELLS, DIVERGED, LOSES

TARGETS = (0.75, 0.8)
SEEDS = range(6)
PAPER = "snip-paper"
OURS = ("snip-linear", "snip-gemm", "replan")
BASELINES = ("random", "min-abs-err", "min-rel-err", "layer-type", "layer-id")
"""Those of the paper."""

OTHERS = (
    "random-gemm",
    "last-blocks",
    "grads-first",
    "norms",
    "norms-gemm",
    "norms-kinds",
    "error-threshold",
)
VARIANTS = (PAPER, *BASELINES, *OURS, *OTHERS)
MOST_SEEDS, MOST_BASELINES = 4, 3
"""A policy collapses if this many seeds do; the paper is reproduced if this many baselines do."""

LEVEL = 0.05


def keys_of(name: str, seed: int) -> list[dict[str, Any]]:
    """Return the keys of the rows of a seed, in their order."""
    low = CELLS[name].low
    place = {"kind": "hardest", "setup": name, "scenario": "plain", "low": low}
    place |= {"seed": seed, "data_seed": 0}
    branches = [(variant, 0.0) for variant in ("bf16", "uniform-fp8", f"uniform-{low}")]
    branches += [(variant, target) for target in TARGETS for variant in VARIANTS]
    return [{**place, "variant": variant, "target": target} for variant, target in branches]


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

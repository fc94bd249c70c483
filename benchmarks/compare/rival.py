"""Does measuring products buy anything over norms? The verdict of the runs of `rival`.

Preregistered in docs/preregistration.md, "The rival by norms". The runs are made at the tag
`variants.TAG`, which measures products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.compare import analysis

TARGETS = (0.75, 0.8, 0.9)
FORMATS = ("fp4", "fp3")
SEEDS = range(6)
SETUPS_OF_TEST = ("deep", "experts")
SNIP, NORMS = "snip-gemm", "norms-gemm"
MARGINS = {"fp4": 0.5, "fp3": 1.0}
"""The difference that matters, in 1e-3 nat."""

LEVEL = 0.05


def missing(rows: Sequence[dict[str, Any]]) -> list[tuple[str, int, str]]:
    """Return (setup, seed, format) of the primary test whose differences are not complete."""
    wanted = product(SETUPS_OF_TEST, SEEDS, FORMATS)
    return [(setup, seed, low) for setup, seed, low in wanted
            if (setup, seed) not in differences(rows, low)]  # fmt: skip


def differences(
    rows: Sequence[dict[str, Any]], low: str, key: str = "loss"
) -> dict[tuple[str, int], float]:
    """Return {(setup, seed): NORMS - SNIP, the mean over TARGETS, in 1e-3 nat} of the test.

    Of a seed that has rows of two machines, the first warm model counts.
    """
    found: dict[tuple[str, int, str], dict[tuple[float, str], float]] = {}
    for row in rows:
        if row["setup"] in SETUPS_OF_TEST and row["low"] == low and row["scenario"] == "plain":
            pair = (row["setup"], row["seed"], row["start"])
            found.setdefault(pair, {})[row["target"], row["variant"]] = row[key]
    result: dict[tuple[str, int], float] = {}
    for (setup, seed, _), losses in found.items():
        if all((t, v) in losses for t in TARGETS for v in (SNIP, NORMS)) and seed in SEEDS:
            mean = np.mean([losses[t, NORMS] - losses[t, SNIP] for t in TARGETS])
            result.setdefault((setup, seed), float(analysis.MILLI * mean))
    return result


@dataclass(frozen=True)
class Test:
    """The primary test of one format: a paired t-test of NORMS - SNIP over setups and seeds."""

    mean: analysis.Mean
    p: float

    @property
    def top(self) -> float:
        """The upper end of the 95 % interval."""
        return self.mean.mean + self.mean.half


def primary(rows: Sequence[dict[str, Any]], key: str = "loss") -> dict[str, Test]:
    """Return the test of each format, p corrected for two formats (Holm)."""
    values = {low: list(differences(rows, low, key).values()) for low in FORMATS}
    p = {low: float(stats.ttest_1samp(found, 0.0).pvalue) for low, found in values.items()}
    # Plans that are all equal have no difference and no p.
    p = {low: 1.0 if np.isnan(value) else value for low, value in p.items()}
    first, second = sorted(FORMATS, key=lambda low: p[low])
    holm = {first: min(1.0, 2 * p[first])}
    holm[second] = max(holm[first], p[second])
    return {low: Test(analysis.mean_of(found), holm[low]) for low, found in values.items()}


def verdict(tests: dict[str, Test]) -> str:
    """Return what the primary test decides: `snip`, `norms`, `equal` or `undecided`.

    A format is for SNIP if the difference is significantly positive and its interval reaches
    beyond the margin, for norms if it is significantly negative; norms are no worse in it if the
    interval ends below the margin.
    """
    for_snip = {
        low for low, test in tests.items()
        if test.p < LEVEL and test.mean.mean > 0 and test.top > MARGINS[low]
    }  # fmt: skip
    for_norms = {low for low, test in tests.items() if test.p < LEVEL and test.mean.mean < 0}
    no_worse = {low for low, test in tests.items() if test.top <= MARGINS[low]}
    if for_snip and not for_norms:
        return "snip"
    if no_worse == set(tests):
        return "norms" if for_norms else "equal"
    return "undecided"


def report(rows: list[dict[str, Any]]) -> str:
    """Return the verdict and the tables, or before that only what is missing."""
    lacking = missing(rows)
    if lacking:
        num_wanted = len(SETUPS_OF_TEST) * len(SEEDS) * len(FORMATS)
        text = f"{num_wanted - len(lacking)} of {num_wanted} differences of the primary test"
        return f"{len(rows)} rows, {text}; no losses are shown before it is complete"
    lines = []
    for name, key in (("in the plan's precision", "loss"), ("in BF16", "loss_bf16")):
        for low, test in primary(rows, key).items():
            lines.append((name, low, str(test.mean), f"{test.p:.3f}", f"{MARGINS[low]}"))
    head = ("evaluated", "format", f"{NORMS} - {SNIP}", "p (Holm)", "margin")
    texts = [f"verdict: {verdict(primary(rows))}", analysis.markdown(head, lines)]
    texts.append(cells_table(rows))
    return "\n\n".join(texts)


def cells_table(rows: list[dict[str, Any]]) -> str:
    """Return gap and difference to SNIP of each variant by setup, scenario, format and target."""
    places = dict.fromkeys((r["setup"], r["scenario"], r["low"], r["target"]) for r in rows)
    lines = []
    for setup, scenario, low, target in sorted(places):
        part = [
            {**row, "data_seed": row["start"]}  # pairs are of one warm model
            for row in rows
            if (row["setup"], row["scenario"], row["low"]) == (setup, scenario, low)
            and row["target"] in (target, 0.0)
        ]
        found = analysis.gaps(part)
        plans: dict[tuple[int, str], dict[str, str]] = {}
        for row in part:
            plans.setdefault((row["seed"], row["start"]), {})[row["variant"]] = row["plan"]
        num_equal = sum(SNIP in of and of[SNIP] == of.get(NORMS) for of in plans.values())
        for variant, values in found.items():
            against = analysis.paired(values, found.get(SNIP, {})) if variant != SNIP else []
            cells = [setup, scenario, low, f"{target:g}", variant, str(len(values))]
            cells.append(str(analysis.mean_of(list(values.values()))))
            cells.append(str(analysis.mean_of(against)) if against else "")
            cells.append(analysis.p_text(against) if against else "")
            lines.append((*cells, str(num_equal) if variant == NORMS else ""))
    head = ("setup", "scenario", "format", "target", "variant", "seeds", "gap", f"over {SNIP}")
    return analysis.markdown((*head, "p", "equal plans"), lines)

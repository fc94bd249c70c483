"""Does measuring products buy anything over norms? The runs of `rival` and their verdict.

Preregistered in docs/preregistration.md, "The rival by norms": SCHEDULE has the runs in their
order, `verdict` the primary test. Until its rows are complete, nothing is printed about losses.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.compare import analysis
from benchmarks.compare.policies import run_branches, saved_model
from benchmarks.compare.runs import SETUPS, warm_model
from benchmarks.compare.store import ResultStore

TARGETS = (0.75, 0.8, 0.9)
FORMATS = ("fp4", "fp3")
SEEDS = range(6)
SETUPS_OF_TEST = ("deep", "experts")
SNIP, NORMS = "snip-gemm", "norms-gemm"
PAIR = ("bf16", SNIP, NORMS)
MARGINS = {"fp4": 0.5, "fp3": 1.0}
"""The difference that matters, in 1e-3 nat."""

LEVEL = 0.05


@dataclass(frozen=True)
class Step:
    """Runs of some setups: for each seed all of them, so that seeds are balanced when it stops.

    `variants` name the pair that is compared again: where another machine continues, whose warm
    models have other bits, the pair is made there too.
    """

    setups: tuple[str, ...]
    variants: tuple[str, ...]
    targets: tuple[float, ...] = TARGETS
    formats: tuple[str, ...] = FORMATS
    seeds: Sequence[int] = SEEDS
    scenario: str = "plain"

    def keys(self, setup: str, seed: int) -> list[dict[str, Any]]:
        """Return the keys of the rows of one warm model, in their order."""
        place = {"kind": "rival", "setup": setup, "scenario": self.scenario}
        place |= {"seed": seed, "data_seed": 0}
        found = []
        for low, target, variant in product(self.formats, self.targets, self.variants):
            # One BF16 branch serves all targets of a format; that of other formats is equal.
            if variant != "bf16" or target == self.targets[0]:
                found.append(
                    {
                        **place,
                        "low": low,
                        "variant": variant,
                        "target": 0.0 if variant == "bf16" else target,
                    }
                )
        return found


FOLLOWING = (*PAIR, "replan", "replan-norms-gemm")

SCHEDULE = (
    Step(SETUPS_OF_TEST, PAIR),
    Step(SETUPS_OF_TEST, (*PAIR, "grads-first", "norms-kinds")),
    Step(SETUPS_OF_TEST, FOLLOWING, targets=(0.8,)),
    Step(("deep",), FOLLOWING, targets=(0.8,), scenario="late-outliers"),
    Step(("gqa",), PAIR),
    Step(("large",), PAIR, targets=(0.8,), seeds=range(2)),
)


def blocks() -> Iterator[tuple[Step, str, int]]:
    """Yield (step, setup, seed) in the order of the runs; each is one warm model."""
    for step in SCHEDULE:
        for seed, setup in product(step.seeds, step.setups):
            yield step, setup, seed


def run_rival(store: ResultStore, options: argparse.Namespace) -> None:
    """Make the rows of SCHEDULE that are missing, until `options.hours` of a core are used."""
    end = time.process_time() + 3600 * options.hours

    def goes_on() -> bool:
        return time.process_time() < end

    for step, setup, seed in blocks():
        if not goes_on():
            return
        keys = step.keys(setup, seed)
        if _is_complete(store, keys):
            continue
        saved = saved_model(options, setup, seed)
        with warm_model(SETUPS[setup], seed, 1, step.scenario, saved) as warm:
            keys = [key for key in keys if not store.has(key, warm.digest)]
            run_branches(store, warm, keys, goes_on)


def _is_complete(store: ResultStore, keys: Sequence[dict[str, Any]]) -> bool:
    """Return whether one warm model has all these rows."""
    starts = {row["start"] for row in store.rows}
    return any(all(store.has(key, start) for key in keys) for start in starts)


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

"""The gap to BF16 against the share of FLOPs in the low format, as tables.

At equal loss: a rule has some gap at a target; SNIP's curve has the same gap at a larger share. The
curves are means over seeds, straight between targets, and made non-decreasing (isotonic regression)
so that a gap belongs to one share. Seeds are drawn anew with replacement (bootstrap), the same ones
for both policies, and the interval holds 95 % of the results.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.optimize import isotonic_regression

from benchmarks.compare import analysis

VARIANTS = ("snip-gemm", "grads-first", "snip-linear", "norms", "last-blocks", "random")
TARGETS = (0.5, 0.67, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)
REFERENCE = "snip-gemm"
RIVALS = {"snip-gemm": ("grads-first",), "snip-linear": ("norms", "last-blocks")}
"""Whom each of SNIP's variants is compared with: rules of its granularity."""

DRAWS = 10_000

Curve = Mapping[float, Mapping[tuple[int, int], float]]
"""A variant's gaps: {share: {(seed, data seed): gap}}."""


def curves(rows: Iterable[dict[str, Any]], key: str = "loss") -> dict[str, Curve]:
    """Return {variant: curve} of the rows of one setup, scenario and format.

    At share 0 all plans are alike, and no run has that; a curve starts at its first target.
    """
    rows = list(rows)
    bf16 = [row for row in rows if row["variant"] == "bf16"]
    found: dict[str, dict[float, Mapping[tuple[int, int], float]]] = {}
    for target in sorted({row["target"] for row in rows if row["variant"] != "bf16"}):
        part = [row for row in rows if row["target"] == target and row["variant"] != "bf16"]
        share = {row["variant"]: row["share"] for row in part}
        for variant, gaps in analysis.gaps((*bf16, *part), key).items():
            found.setdefault(variant, {})[share[variant]] = gaps
    return found


def share_at(shares: Sequence[float], gaps: Sequence[float], gap: float) -> float:
    """Return the share at which a curve has this gap; NaN beyond its ends.

    Args:
        shares: ascending.
        gaps: at these shares; made non-decreasing here.
        gap: the wanted one.
    """
    rising = isotonic_regression(gaps).x
    if not rising[0] <= gap <= rising[-1]:
        return float("nan")
    k = int(np.searchsorted(rising, gap))
    if k == 0 or rising[k] == gap:
        return float(shares[k])
    step = (gap - rising[k - 1]) / (rising[k] - rising[k - 1])
    return float(shares[k - 1] + step * (shares[k] - shares[k - 1]))


def more_at_equal_loss(curve: Curve, rule: Curve, share: float) -> tuple[float, float, float]:
    """Return how many percent more low FLOPs a curve has where its gap is the rule's at `share`.

    Returns:
        The value for the mean over all seeds, and the ends of its 95 % bootstrap interval; NaN
        where the curve does not reach the rule's gap, or with fewer than three seeds.
    """
    seeds = sorted(rule[share])
    shares = sorted(s for s, gaps in curve.items() if set(seeds) <= set(gaps))
    if not shares:
        return float("nan"), float("nan"), float("nan")
    gaps = np.array([[curve[s][seed] for s in shares] for seed in seeds])
    wanted = np.array([rule[share][seed] for seed in seeds])

    def more(chosen: np.ndarray) -> float:
        mean = gaps[chosen].mean(axis=0)
        return 100 * (share_at(shares, list(mean), float(wanted[chosen].mean())) / share - 1)

    value = more(np.arange(len(seeds)))
    if len(seeds) < 3:
        return value, float("nan"), float("nan")
    rng = np.random.default_rng(0)
    drawn = [more(rng.integers(len(seeds), size=len(seeds))) for _ in range(DRAWS)]
    low, high = np.nanpercentile(drawn, (2.5, 97.5))
    return value, float(low), float(high)


PRIMARY_TARGETS = (0.85, 0.9, 0.95)


def primary(rows: list[dict[str, Any]], key: str) -> str:
    """Return the preregistered difference of grads-first and snip-gemm: a mean over targets."""
    bf16 = [row for row in rows if row["variant"] == "bf16"]
    differences = []
    for target in PRIMARY_TARGETS:
        gaps = analysis.gaps([*bf16, *(row for row in rows if row["target"] == target)], key)
        rule, snip = gaps.get("grads-first", {}), gaps.get(REFERENCE, {})
        differences.append({seed: rule[seed] - snip[seed] for seed in rule if seed in snip})
    seeds = sorted(set.intersection(*map(set, differences)))
    means = [float(np.mean([part[seed] for part in differences])) for seed in seeds]
    if not means:
        return f"grads-first - {REFERENCE}: no seed has all of {PRIMARY_TARGETS}"
    each = ", ".join(f"{value:+.2f}" for value in means)
    return (
        f"grads-first - {REFERENCE}, mean of {PRIMARY_TARGETS}: {analysis.mean_of(means)}, "
        f"p {analysis.p_text(means)} ({each})"
    )


def table(rows: list[dict[str, Any]], name: tuple[str, ...]) -> str:
    """Return the curves of a group of rows: gaps, differences to rules, shares at equal loss."""
    texts = [f"### {' '.join(name)}"]
    for key, title in (("loss", "in the plan's precision"), ("loss_bf16", "in BF16")):
        found = curves(rows, key)
        shares = sorted({share for curve in found.values() for share in curve})
        head = (f"gap, evaluated {title}", *(f"{100 * share:.1f} %" for share in shares))
        lines = [
            (variant, *(_cell(list(curve.get(share, {}).values())) for share in shares))
            for variant, curve in found.items()
        ]
        texts.append(analysis.markdown(head, lines))
        texts.append(primary(rows, key))
        lines = []
        for snip, rules in RIVALS.items():
            for rule in (r for r in rules if snip in found and r in found):
                differences = [
                    analysis.paired(found[rule].get(s, {}), found[snip].get(s, {})) for s in shares
                ]
                cells = [f"{_cell(d)}, p {analysis.p_text(d)}" if d else "" for d in differences]
                lines.append((f"{rule} - {snip}", *cells))
        head = (f"difference, evaluated {title}", *head[1:])
        texts.append(analysis.markdown(head, lines))
        lines = []
        for snip, rules in RIVALS.items():
            for rule in (r for r in rules if snip in found and r in found):
                cells = [
                    _percent(more_at_equal_loss(found[snip], found[rule], share))
                    if share in found[rule] and 0.7 < share < 1.0
                    else ""
                    for share in shares
                ]
                lines.append((f"{snip} over {rule}", *cells))
        head = (f"more low FLOPs at equal loss, evaluated {title}", *head[1:])
        texts.append(analysis.markdown(head, lines))
    return "\n\n".join(texts)


def _cell(gaps: list[float]) -> str:
    return f"{analysis.mean_of(gaps)} ({len(gaps)})" if gaps else ""


def _percent(found: tuple[float, float, float]) -> str:
    value, low, high = found
    if np.isnan(value):
        return "not reached"
    return f"{value:+.1f} %" + ("" if np.isnan(low) else f" [{low:+.1f}, {high:+.1f}]")

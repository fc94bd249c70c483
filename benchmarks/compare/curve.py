"""The gap to BF16 against the share of FLOPs in the low format, as tables.

At equal loss: a rule has some gap at a target; SNIP's curve has the same gap at a larger share. The
curves are means over seeds, straight between targets, and made non-decreasing (isotonic regression)
so that a gap belongs to one share. Seeds are drawn anew with replacement (bootstrap), the same ones
for both policies, and the interval holds 95 % of the results.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
from scipy.optimize import isotonic_regression

from benchmarks.compare import analysis
from benchmarks.compare.times import GPUS, Gpu, percent_saved

VARIANTS = ("snip-gemm", "grads-first", "snip-linear", "norms", "last-blocks", "random")
TARGETS = (0.5, 0.67, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)
REFERENCE = "snip-gemm"
RIVALS = {"snip-gemm": ("grads-first", "snip-linear"), "snip-linear": ("norms", "last-blocks")}
"""Whom each of SNIP's variants is compared with: rules of its granularity, and SNIP per linear."""
OTHERS = {
    "norms-q-gemm": ("grads-first", "norms-gemm"),
    "norms-q-linear": ("norms", "last-blocks"),
    "replan": ("snip-gemm",),
    "heal-plan": ("heal-grads-first",),
}
"""The same for SNIP by norms, and for variants whose plan follows the run: the first plan, and the
rule's healing."""

DRAWS = 10_000

LOSSES = ("loss", "loss_bf16")
"""Evaluated in the plan's precision, and in BF16."""

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
        # Shares of a target are equal, but in the larger model only to within 0.3 %.
        share = round(fmean(row["share"] for row in part), 4)
        for variant, gaps in analysis.gaps((*bf16, *part), key).items():
            found.setdefault(variant, {})[share] = gaps
    return found


def share_at(shares: Sequence[float], gaps: Sequence[float], gap: float) -> float:
    """Return the share at which a curve has this gap; beyond its ends, the nearest share.

    Args:
        shares: ascending.
        gaps: at these shares; made non-decreasing here.
        gap: the wanted one.
    """
    rising = isotonic_regression(gaps).x
    if gap > rising[-1]:
        return float(shares[-1])
    k = int(np.searchsorted(rising, gap))
    if k == 0 or rising[k] <= gap:
        return float(shares[k])
    step = (gap - rising[k - 1]) / (rising[k] - rising[k - 1])
    return float(shares[k - 1] + step * (shares[k] - shares[k - 1]))


def more_at_equal_loss(
    curve: Curve, rule: Curve, share: float
) -> tuple[float, float, float] | None:
    """Return how many percent more low FLOPs a curve has where its gap is the rule's at `share`.

    Returns:
        The value for the mean over all seeds, and the ends of its 95 % bootstrap interval. The
        value is NaN where the curve does not reach the rule's gap, the ends with fewer than three
        seeds. A drawn curve that does not reach the gap counts as its largest share, and one that
        begins above it as its smallest. None if the curve is one point or less of the rule's
        seeds.
    """
    seeds = sorted(rule[share].keys() & curve.get(share, {}).keys())
    shares = sorted(s for s, gaps in curve.items() if set(seeds) <= set(gaps))
    if not seeds or len(shares) < 2:
        return None
    gaps = np.array([[curve[s][seed] for s in shares] for seed in seeds])
    wanted = np.array([rule[share][seed] for seed in seeds])

    def more(chosen: np.ndarray) -> float:
        mean = gaps[chosen].mean(axis=0)
        return 100 * (share_at(shares, list(mean), float(wanted[chosen].mean())) / share - 1)

    value = more(np.arange(len(seeds)))
    if wanted.mean() > gaps.mean(axis=0).max():
        value = float("nan")
    if len(seeds) < 3:
        return value, float("nan"), float("nan")
    rng = np.random.default_rng(0)
    drawn = [more(rng.integers(len(seeds), size=len(seeds))) for _ in range(DRAWS)]
    low, high = np.percentile(drawn, (2.5, 97.5))
    return value, float(low), float(high)


PRIMARY_TARGETS = (0.85, 0.9, 0.95)
PRIMARY_SEEDS = range(6)
LATER_SEEDS = range(6, 9)
"""Those of the preregistered difference, and those that repeat it."""


def primary(rows: list[dict[str, Any]], key: str, seeds: Container[int]) -> str | None:
    """Return the difference of grads-first and snip-gemm, a mean over targets, of these seeds.

    None if none of them has all of these targets.
    """
    rows = [row for row in rows if row["seed"] in seeds]
    bf16 = [row for row in rows if row["variant"] == "bf16"]
    differences = []
    for target in PRIMARY_TARGETS:
        gaps = analysis.gaps([*bf16, *(row for row in rows if row["target"] == target)], key)
        rule, snip = gaps.get("grads-first", {}), gaps.get(REFERENCE, {})
        differences.append({seed: rule[seed] - snip[seed] for seed in rule if seed in snip})
    pairs = sorted(set.intersection(*map(set, differences)))
    means = [float(np.mean([part[pair] for part in differences])) for pair in pairs]
    if not means:
        return None
    each = ", ".join(f"{value:+.2f}" for value in means)
    return (
        f"grads-first - {REFERENCE}, mean of {PRIMARY_TARGETS}: {analysis.mean_of(means)}, "
        f"p {analysis.p_text(means)} ({each})"
    )


def table(rows: list[dict[str, Any]]) -> str:
    """Return the curves of a group of rows as one table, the primary difference, and times.

    A cell has two values: evaluated in the plan's precision / in BF16. Times are predicted.
    """
    both = [curves(rows, key) for key in LOSSES]
    shares = sorted({share for curve in both[0].values() for share in curve})
    pairs = [
        (snip, rule)
        for snip, rules in (RIVALS | OTHERS).items()
        for rule in rules
        if snip in both[0] and rule in both[0]
    ]
    order = [*VARIANTS, *sorted(set(both[0]) - set(VARIANTS))]
    lines = [
        (variant, *(_gaps([found[variant].get(share) for found in both]) for share in shares))
        for variant in order
        if variant in both[0]
    ]
    for snip, rule in pairs:
        cells = [_differences(both, snip, rule, share) for share in shares]
        if any(cells):
            lines.append((f"{rule} - {snip}", *cells))
    for snip, rule in pairs:
        if snip != REFERENCE:
            continue
        cells = [_more(both, snip, rule, share) for share in shares]
        if any(cells):
            lines.append((f"more low FLOPs at equal loss: {snip} over {rule}", *cells))
    rule = RIVALS[REFERENCE][0]
    if (REFERENCE, rule) in pairs:
        for gpu in GPUS:
            cells = [_saved(gpu, both[0], rule, share) for share in shares]
            formats = f"{gpu.high.upper()} and {gpu.low.upper()} on {gpu.name}"
            if any(cells):
                lines.append((f"predicted time saved over {rule} at equal loss, {formats}", *cells))
    seeds = len({row["seed"] for row in rows if row["variant"] != "bf16"})
    title = f"{rows[0]['low']}, {rows[0]['setup']} model, {seeds} seeds"
    head = (title, *(f"{100 * s:.1f} %" for s in shares))
    texts = [analysis.markdown(head, lines), ""]
    for evaluated, key in zip(("in the plan's precision", "in BF16"), LOSSES, strict=True):
        for name, of_seeds in (("", PRIMARY_SEEDS), ("the repetition, ", LATER_SEEDS)):
            found = primary(rows, key, of_seeds)
            if found is not None:
                texts.append(f"- {name}{evaluated}: {found}")
    return "\n".join(texts).strip()


def summary(rows: list[dict[str, Any]]) -> str:
    """Return SNIP per GEMM against the rule as a short table: one line for each share.

    A line is of the seeds that both have. Columns without a value are left out: intervals and p
    need two seeds, the rest a curve.
    """
    rule = RIVALS[REFERENCE][0]
    both = [curves(rows, key) for key in LOSSES]
    head = (
        "share of FLOPs",
        "seeds",
        f"`{REFERENCE}`",
        f"`{rule}`",
        "the rule loses more by",
        "the same, weights evaluated in BF16",
        "SNIP's FLOPs at equal loss",
    )
    lines = []
    for share in sorted(set(both[0][REFERENCE]) & set(both[0][rule])):
        snip_gaps, rule_gaps = (both[0][variant][share] for variant in (REFERENCE, rule))
        seeds = sorted(snip_gaps.keys() & rule_gaps.keys())
        line = [f"{100 * share:.1f} %", str(len(seeds))]
        for gaps in (snip_gaps, rule_gaps):
            line.append(str(analysis.mean_of([gaps[seed] for seed in seeds])))
        line += [_differences([found], REFERENCE, rule, share) for found in both]
        line.append(_more(both[:1], REFERENCE, rule, share))
        lines.append(line)
    num_columns = len(head) if any(line[-1] for line in lines) else len(head) - 1
    return analysis.markdown(head[:num_columns], [line[:num_columns] for line in lines])


def _gaps(both: Sequence[Mapping[tuple[int, int], float] | None]) -> str:
    """Return the mean gaps, with their number in parentheses."""
    if both[0] is None:
        return ""
    means = [str(analysis.mean_of(list(gaps.values()))) for gaps in both if gaps is not None]
    return f"{' / '.join(means)} ({len(both[0])})"


def _differences(both: Sequence[Mapping[str, Curve]], snip: str, rule: str, share: float) -> str:
    texts = []
    for found in both:
        found_pairs = analysis.paired(found[rule].get(share, {}), found[snip].get(share, {}))
        if found_pairs:
            p = f", p {analysis.p_text(found_pairs)}" if len(found_pairs) > 1 else ""
            texts.append(f"{analysis.mean_of(found_pairs)}{p}")
    return " / ".join(texts)


def _more(both: Sequence[Mapping[str, Curve]], snip: str, rule: str, share: float) -> str:
    """Return percent more low FLOPs; nothing where few plans differ or all are alike.

    Nothing either where SNIP's curve is one point of the rule's seeds.
    """
    if share not in both[0][rule] or not 0.7 < share < 1.0:
        return ""
    each = [more_at_equal_loss(found[snip], found[rule], share) for found in both]
    return " / ".join(_percent(more) for more in each if more is not None)


def _saved(gpu: Gpu, found: Mapping[str, Curve], rule: str, share: float) -> str:
    """Return the predicted time saved at equal loss; nothing where it is not known."""
    if share not in found[rule] or not 0.7 < share < 1.0:
        return ""
    more = more_at_equal_loss(found[REFERENCE], found[rule], share)
    if more is None or np.isnan(more[0]):
        return ""
    return f"{percent_saved(gpu, share, more[0]):.1f} %"


def _percent(found: tuple[float, float, float]) -> str:
    value, low, high = found
    if np.isnan(value):
        return "not reached"
    if np.isnan(low):
        return f"{value:+.1f} %"
    # SNIP's curve begins at the rule's share: it cannot be seen to have fewer low FLOPs.
    least = "≤ 0" if low == 0.0 else f"{low:+.1f}"
    return f"{value:+.1f} % [{least}, {high:+.1f}]"

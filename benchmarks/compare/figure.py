"""The picture of a comparison: gap against the share of FLOPs in the low format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks.compare import analysis
from benchmarks.compare.curve import VARIANTS, Curve, curves
from benchmarks.compare.estimated import Estimate

TITLES = {"fp3": "fp3 (3 bits), the rest in FP8", "fp4": "E2M1 (FP4), the rest in FP8"}

STYLES = dict(
    zip(
        VARIANTS,
        (
            ("#1f6fd1", "o", "-"),
            ("#c2251c", "s", "-"),
            ("#1f6fd1", "o", "--"),
            ("#2e8540", "^", "--"),
            ("#d98200", "v", "--"),
            ("#6b7685", "d", "--"),
        ),
        strict=True,
    )
)
"""Color, marker and line of each variant. Where a linear has one format, lines are dashed and
markers hollow."""

LEAST_SEEDS = 3

OFFSET = 0.25
"""Percent between the markers of two variants at the same share."""


def draw(rows: list[dict[str, Any]], estimates: Mapping[str, Estimate], path: Path) -> None:
    """Draw a panel for each format: lines are estimates by `forks`, markers are trained runs.

    An estimate that explains nothing of unseen branches has no lines. A marker is the mean of at
    least LEAST_SEEDS seeds.

    Args:
        rows: of `policies` with targets, of one setup and scenario.
        estimates: by format.
        path: of the picture; its ending gives the type.
    """
    formats = sorted({*estimates, *(row["low"] for row in rows)})
    figure = Figure(figsize=(5.4 * len(formats), 4.3), layout="constrained")
    panels = figure.subplots(1, len(formats), squeeze=False)[0]
    for panel, low in zip(panels, formats, strict=True):
        if low in estimates and estimates[low].fit.costs.additivity > 0:
            _draw_estimate(panel, estimates[low])
        _draw_runs(panel, curves(row for row in rows if row["low"] == low))
        panel.set_title(TITLES.get(low, low))
        panel.set_xlabel("share of the linears' FLOPs in the lowest precision (%)")
        panel.set_ylabel("held-out loss over BF16 (1e-3 nat)")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    handles = [
        Line2D(
            [],
            [],
            color=color,
            marker=marker,
            mfc=_fill(color, line),
            ls=line,
            lw=1.2,
            label=variant,
        )
        for variant, (color, marker, line) in STYLES.items()
    ]
    panels[0].legend(handles=handles, frameon=False, fontsize=8)
    # Without a salt and without a date, the same figure would be another file each time.
    with rc_context({"svg.hashsalt": "megatron-snip"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw_estimate(panel: Axes, estimate: Estimate) -> None:
    for variant, (color, _, line) in STYLES.items():
        shares = np.array(sorted(estimate.low[variant]))
        costs = np.array([estimate.cost(variant, share) for share in shares])
        panel.plot(100 * shares, costs, line, color=color, lw=1.2)


def _draw_runs(panel: Axes, found: Mapping[str, Curve]) -> None:
    for k, (variant, (color, marker, line)) in enumerate(STYLES.items()):
        for share, gaps in found.get(variant, {}).items():
            if len(gaps) < LEAST_SEEDS:
                continue
            mean = analysis.mean_of(list(gaps.values()))
            panel.errorbar(
                100 * share + OFFSET * (k - 2.5) * (share < 1.0),
                mean.mean,
                yerr=mean.half,
                fmt=marker,
                color=color,
                mfc=_fill(color, line),
                ms=5,
                capsize=2,
                elinewidth=0.8,
            )


def _fill(color: str, line: str) -> str:
    return color if line == "-" else "white"

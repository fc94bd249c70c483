"""How far the probe stands clear of rounding: its signal-to-noise ratio.

    snr = (|change|^2 - noise) / noise        of dG and of dX, in dB

In BF16 a value differs from itself under the probe by rounding alone (probe.py subtracts what that
gives on average). Where the rest is smaller than what was subtracted, the second-order part of a
linear's weight divergence is a guess.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_snip.statistics.records import LinearStatistics

POOR_DB = 0.0
"""Below this the probe's signal is smaller than the rounding noise taken off it."""

FLOOR_DB = -100.0
"""Stands for a probe in which nothing but rounding was seen."""


def probe_snr_db(linear: LinearStatistics) -> float | None:
    """Return the smaller ratio of dG and dX in dB, >= FLOOR_DB; None in FP32 compute.

    A dX or dG that the probe cannot change (of the first linear, say) does not count.
    """
    pairs = (
        (linear.probe_grad_square, linear.probe_grad_noise),
        (linear.probe_input_square, linear.probe_input_noise),
    )
    found = [_db(square, noise) for square, noise in pairs if square > 0 and noise > 0]
    return min(found, default=None)


def poor_probes(linears: Sequence[LinearStatistics]) -> list[str]:
    """Return the names of linears whose probe is below POOR_DB, poorest first."""
    rated = [(probe_snr_db(linear), linear.name) for linear in linears]
    return [
        name for db, name in sorted((db, n) for db, n in rated if db is not None) if db < POOR_DB
    ]


def poor_probe_warning(linears: Sequence[LinearStatistics]) -> str | None:
    """Return a line that names what is poor and what to do, or None."""
    poor = poor_probes(linears)
    if not poor:
        return None
    others = f" and {len(poor) - 1} more" if len(poor) > 1 else ""
    return (
        f"the probe does not stand clear of BF16 rounding at {poor[0]}{others}: their weight "
        "divergences are guesses; raise probe_relative_step, "
        "probe_rows or probes"
    )


def _db(square: float, noise: float) -> float:
    ratio = (square - noise) / noise
    if math.isnan(ratio):
        return math.nan
    return max(10 * math.log10(ratio), FLOOR_DB) if ratio > 0 else FLOOR_DB

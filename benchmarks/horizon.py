"""What a gap over hundreds of steps is made of, fitted to all runs of a comparison.

    python -m benchmarks.horizon OUTPUT --config configs/compare-warm.yaml --lowest fp3

OUTPUT is the directory of a comparison with runs from scratch. For every finished run that had
something in the lowest format, with x[l, gemm] the share of its steps that a GEMM of linear l ran
in it and the statistics of the refreshes of the same seed's `snip-linear` run (their mean),

    gap = a sum_l x[l, fprop] fisher[l]                  loss divergence: what quantizing does now
        + b sum_l x[l, fprop] sqrt(forward_square[l])    what it does to updates, norms added up
        + c sum_l x[l, dgrad] flops[l] + d sum_l x[l, wgrad] flops[l]         noise of gradients

with a, b, c, d >= 0 by least squares (flops as shares of all). Norms that add up mean errors that
point the same way from linear to linear and step to step; noise would add in squares. The fit
says what is behind a gap, and integer programs over it (HiGHS) say what the best plan by linear
and by GEMM would leave. It is fitted to one model and schedule, and not used by the planner.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.optimize import Bounds, LinearConstraint, milp, nnls

from benchmarks.machine import write_result
from megatron_snip.comparison.contender import BUILT_IN
from megatron_snip.comparison.low_shares import share_in
from megatron_snip.comparison.outcome import Outcome
from megatron_snip.comparison.schedule import make_schedule
from megatron_snip.comparison.settings import ComparisonConfig, load_comparison
from megatron_snip.comparison.store import Store
from megatron_snip.errors import UsageError
from megatron_snip.types import Gemm

Floats = NDArray[np.float64]
TERMS = ("loss now", "updates", "dgrad", "wgrad")
MEASURED = "snip-linear"
"""The contender whose refreshes' statistics stand for all runs of its seed."""


@dataclass(frozen=True)
class Statistics:
    """What a GEMM of each linear puts into each term when it runs in the lowest format.

    Attributes:
        names: of the linears.
        flops: [linears], shares of all.
        terms: [linears, 3 GEMMs, 4 terms].
    """

    names: tuple[str, ...]
    flops: Floats
    terms: Floats


@dataclass(frozen=True)
class Sample:
    """A finished run.

    Attributes:
        contender: name.
        seed: repetition.
        gap: held-out loss at the end minus BF16's, nats.
        terms: [4], its sums over linears.
    """

    contender: str
    seed: int
    gap: float
    terms: Floats


def statistics_of(files: Sequence[Mapping[str, Any]], lowest: str) -> Statistics:
    """Return the mean over refreshes.

    Args:
        files: contents of divergences/<step>.json, at least one.
        lowest: a format that they measured.
    """
    rows = files[0]["linears"]
    flops = np.array([row["flops"] for row in rows], np.float64)
    flops /= flops.sum()
    terms = np.zeros((len(rows), 3, 4))
    for content in files:
        for k, row in enumerate(content["linears"]):
            of_format = row["statistics"]["formats"][lowest]
            terms[k, 0, 0] += of_format["fisher"] / len(files)
            terms[k, 0, 1] += np.sqrt(of_format["forward_square"]) / len(files)
    terms[:, 1, 2] = flops
    terms[:, 2, 3] = flops
    return Statistics(tuple(row["name"] for row in rows), flops, terms)


def terms_of(outcome: Outcome, statistics: Statistics, lowest: str) -> Floats:
    """Return [4]: a run's sums."""
    used = np.array(
        [
            [share_in(outcome.options[name], gemm, lowest) for gemm in Gemm]
            for name in statistics.names
        ]
    )
    total: Floats = np.einsum("lg,lgt->t", used, statistics.terms)
    return total


def fit(terms: Floats, gaps: Floats) -> tuple[Floats, float]:
    """Return [4] coefficients (>= 0) and the root mean square error of leaving each run out."""
    coefficients: Floats = nnls(terms, gaps)[0]
    missed = [
        gap - row @ nnls(np.delete(terms, k, 0), np.delete(gaps, k))[0]
        for k, (row, gap) in enumerate(zip(terms, gaps, strict=True))
    ]
    return coefficients, float(np.sqrt(np.mean(np.square(missed))))


def best_plan(
    statistics: Statistics, coefficients: Floats, target: float, by_gemm: bool
) -> tuple[float, list[str]]:
    """Return the least gap that a plan can leave under a fit, and what it protects."""
    costs = statistics.terms @ coefficients
    flops = np.repeat(statistics.flops[:, None] / 3, 3, axis=1)
    labels = [[f"{_short(name)}:{gemm.value}" for gemm in Gemm] for name in statistics.names]
    if not by_gemm:
        costs, flops = costs.sum(1, keepdims=True), flops.sum(1, keepdims=True)
        labels = [[_short(name)] for name in statistics.names]
    found = milp(
        costs.ravel(),
        constraints=LinearConstraint(flops.reshape(1, -1), target - 1e-9, np.inf),
        bounds=Bounds(0, 1),
        integrality=np.ones(costs.size),
    )
    flat = [label for row in labels for label in row]
    return float(found.fun), [label for label, x in zip(flat, found.x, strict=True) if x < 0.5]


def read_samples(
    config: ComparisonConfig, lowest: str
) -> tuple[list[Sample], dict[int, Statistics]]:
    """Return all runs that can be used, and each seed's statistics.

    Raises:
        UsageError: if there are too few to fit.
    """
    names = [*dict.fromkeys(("bf16", lowest, *config.policies, *BUILT_IN, *config.contenders))]
    store = Store(config.output)
    wanted = config.model_copy(update={"policies": tuple(names), "lowest": (lowest,)})
    entries = make_schedule(wanted).entries
    found = {(e.contender, e.seed): (e.run, store.outcome(e.run)) for e in entries}
    samples, statistics = [], {}
    for (name, seed), (run, _) in found.items():
        files = sorted((store.run_dir(run) / "divergences").glob("*.json"))
        if name == MEASURED and files:
            read = [json.loads(file.read_text()) for file in files]
            statistics[seed] = statistics_of(read, lowest)
    for (name, seed), (_, outcome) in found.items():
        base = found["bf16", seed][1]
        if outcome is None or base is None or seed not in statistics or not outcome.options:
            continue
        terms = terms_of(outcome, statistics[seed], lowest)
        if terms.any():
            gap = outcome.validation_loss - base.validation_loss
            samples.append(Sample(name, seed, gap, terms))
    if len(samples) < 2 * len(TERMS):
        raise UsageError(f"'{config.output}' has {len(samples)} runs to fit; more are needed")
    return samples, statistics


def result_of(config: ComparisonConfig, lowest: str, target: float) -> dict[str, Any]:
    """Return the fit and what follows from it as plain types; losses in nats."""
    samples, statistics = read_samples(config, lowest)
    terms, gaps = np.array([s.terms for s in samples]), np.array([s.gap for s in samples])
    coefficients, left_out = fit(terms, gaps)
    fitted = terms @ coefficients
    seed = min(statistics)
    everything = statistics[seed].terms.sum((0, 1)) * coefficients
    best = {
        how: best_plan(statistics[seed], coefficients, target, how == "gemm")
        for how in ("linear", "gemm")
    }
    return {
        "lowest": lowest,
        "target": target,
        "seed": seed,
        "runs": [
            {"contender": s.contender, "seed": s.seed, "gap": s.gap, "fitted": float(f)}
            for s, f in zip(samples, fitted, strict=True)
        ],
        "rms": float(np.sqrt(np.mean(np.square(fitted - gaps)))),
        "rms_left_out": left_out,
        "of_everything_low": dict(zip(TERMS, everything.tolist(), strict=True)),
        "least_gap": {how: gap for how, (gap, _) in best.items()},
        "best_plan_protects": {how: kept for how, (_, kept) in best.items()},
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print, and write if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="directory of a comparison")
    parser.add_argument("--config", type=Path, required=True, metavar="FILE")
    parser.add_argument("--lowest", default="fp3", metavar="NAME")
    parser.add_argument("--target", type=float, default=0.75, metavar="T")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers")
    args = parser.parse_args(argv)
    flags = {"output": args.output, "modes": ("scratch",), "targets": (args.target,)}
    result = result_of(load_comparison(args.config, flags), args.lowest, args.target)
    _print(result)
    if args.json is not None:
        write_result(args.json, result)
    return 0


def _print(result: Mapping[str, Any]) -> None:
    table = Table("run", "seed", "gap, 1e-3", "fitted")
    for run in sorted(result["runs"], key=lambda each: each["gap"]):
        cells = (run["contender"], str(run["seed"]), f"{1e3 * run['gap']:.1f}")
        table.add_row(*cells, f"{1e3 * run['fitted']:.1f}")
    console = Console(width=110)
    console.print(table)
    parts = ", ".join(f"{t} {1e3 * v:.1f}" for t, v in result["of_everything_low"].items())
    console.print(f"everything in {result['lowest']}: {parts}")
    console.print(
        f"root mean square error {1e3 * result['rms']:.1f}; of a run left out of the fit "
        f"{1e3 * result['rms_left_out']:.1f}"
    )
    for how, gap in result["least_gap"].items():
        kept = ", ".join(result["best_plan_protects"][how])
        console.print(f"best plan by {how}: {1e3 * gap:.1f}; it protects {kept}")


def _short(name: str) -> str:
    return re.sub(r"^decoder\.layers\.|self_attention\.|mlp\.|linear_", "", name)


if __name__ == "__main__":
    raise SystemExit(main())

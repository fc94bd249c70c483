"""Do the divergences predict what quantizing a linear does? Brute force is the truth.

    python -m benchmarks.fidelity [--quick] [--bf16] [--microbatches 2] [--output FILE]

For each model shape and checkpoint, each linear, and each of its GEMMs, is quantized alone and the
same microbatches are run again (benchmarks/lab.py). The change of the real AdamW update of all
linears, and of the loss on held-out text, are compared with what one observed iteration says:

    score        rank correlation (Spearman) over linears, and median of predicted over measured
    sample       the same from the sample of tokens that a job measures, mean over draws
    factored D   |D * eW| with D in factors against each element's own D
    under plan   statistics observed while 75 % of the linears run in the format, against those
                 observed in BF16: Spearman and median ratio of each term
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr

from benchmarks.lab import Lab, open_lab
from benchmarks.machine import RESULTS, write_result
from megatron_snip.config import SnipConfig
from megatron_snip.divergence.quality_loss import (
    absolute_error,
    fprop_scale,
    relative_error,
    weight_divergence,
)
from megatron_snip.options import Option
from megatron_snip.statistics.optimizer_state import optimizer_shards
from megatron_snip.statistics.records import FormatStatistics, LinearStatistics, StatisticsTable
from megatron_snip.statistics.sensitivity import gather_sensitivities

Score = Callable[[LinearStatistics, FormatStatistics], float]

SHAPES = (
    {"num_layers": 6},
    {"num_layers": 3, "hidden_size": 256, "ffn_hidden_size": 512, "num_query_groups": 2},
)
CHECKPOINTS = (60, 120, 200)
GEMMS = {
    "linear": (1, 1, 1),
    "fprop": (1, 0, 0),
    "dgrad": (0, 1, 0),
    "wgrad": (0, 0, 1),
}
DRAWS = 5
"""Samples of tokens that the agreement of a sample is averaged over."""
TERMS = ("loss", "under plan", "factored D")
"""What else is compared, term by term."""
HELD_OUT = 8
"""Microbatches of held-out text."""


def option(name: str, gemm: str) -> Option:
    """Return the option with one GEMM, or all, in a format."""
    return Option(*(name if used else "bf16" for used in GEMMS[gemm]))


def norm_products(s: LinearStatistics, f: FormatStatistics) -> float:
    """|G| (|X| |Q(W)-W| + |Q(X)-X| |W|): the paper's idea, products of Frobenius norms."""
    weight, error = s.weight_square**0.5, f.weight_error_square**0.5
    return s.grad_square**0.5 * (s.input_square**0.5 * error + f.input_error_square**0.5 * weight)


def scores(table: StatisticsTable, name: str, gemm: str) -> dict[str, np.ndarray]:
    """Return what predicts the change of the updates, by score; one entry a linear."""
    chosen = option(name, gemm)
    kappa = fprop_scale(table.linears, name)
    functions: dict[str, Score] = {
        "weight divergence": lambda s, _: weight_divergence(s, chosen, kappa),
        "norm products": norm_products,
        "aligned_fisher": lambda _, f: f.aligned_fisher**0.5,
        "fisher": lambda _, f: f.fisher**0.5,
        "local": lambda _, f: f.local_square**0.5,
        "min-rel-err": lambda s, _: relative_error(s, chosen),
        "min-abs-err": lambda s, _: absolute_error(s, chosen),
    }
    return {
        key: np.array([score(s, s.formats[name]) for s in table.linears])
        for key, score in functions.items()
    }


@dataclass(frozen=True)
class Agreement:
    """Spearman's rank correlation, and the median of predicted over measured."""

    spearman: float
    ratio: float

    @classmethod
    def of(cls, predicted: np.ndarray, measured: np.ndarray) -> Agreement:
        """Compare two vectors; zeros count for ranks only."""
        both = (predicted != 0) & (measured != 0)
        ratio = np.median(predicted[both] / measured[both]) if both.any() else np.nan
        return cls(float(spearmanr(predicted, measured)[0]), float(ratio))


def judge(lab: Lab, name: str, num_microbatches: int) -> dict[str, Any]:
    """Return the agreements at the lab's present checkpoint."""
    batches = lab.microbatches(num_microbatches)
    snip = SnipConfig(formats=("fp8", name) if name != "fp8" else ("fp8",))
    exact = lab.statistics(batches, snip, all_tokens=True)
    draws = [lab.statistics(batches, snip, seed=seed) for seed in range(DRAWS)]
    gradients = lab.gradients(batches)[1]
    base = lab.updates(gradients)

    def change(linear: str, gemm: str) -> float:
        """Root of sum_k |update_k(q) - update_k|^2 / |update_k|^2."""
        updates = lab.updates(lab.gradients(batches, {linear: option(name, gemm)})[1])
        parts = [(updates[k] - u).square().sum() / u.square().sum() for k, u in base.items()]
        return float(sum(parts)) ** 0.5

    found: dict[str, Any] = {}
    for gemm in GEMMS:
        truth = np.array([change(linear, gemm) for linear in lab.names])
        found[gemm] = {
            "size": float((truth**2).sum() ** 0.5),
            "scores": {k: Agreement.of(v, truth) for k, v in scores(exact, name, gemm).items()},
            "sample": float(
                np.mean(
                    [
                        spearmanr(scores(draw, name, gemm)["weight divergence"], truth)[0]
                        for draw in draws
                    ]
                )
            ),
        }
    found["loss"] = _held_out(lab, exact, name)
    found["under plan"] = _under_plan(lab, batches, snip, exact, name)
    found["factored D"] = {"|D * eW|": _factored(lab, batches, gradients, name)}
    return found


def _held_out(lab: Lab, table: StatisticsTable, name: str) -> dict[str, Agreement]:
    """Compare with the change of the loss on text that was not measured; only fprop changes it."""
    held_out = lab.microbatches(HELD_OUT, held_out=True)
    base = lab.losses(held_out)
    changes = [lab.losses(held_out, {n: option(name, "fprop")}) - base for n in lab.names]
    truth = np.array(changes).mean(axis=1)
    found = {}
    for key in ("fisher", "aligned_fisher", "first"):
        values = np.array([getattr(s.formats[name], key) for s in table.linears])
        found[key] = Agreement.of(values, truth)
    return found


def _factored(
    lab: Lab, batches: Sequence[Any], base: Mapping[str, torch.Tensor], name: str
) -> Agreement:
    """Compare |D * eW| with D in factors against |D * eW| with each element's own D."""
    shards = optimizer_shards(lab.state.optimizer)
    weights = lab.model.weights()
    factors = gather_sensitivities(weights, lab.state.optimizer, lab.model.runtime.topology)
    factored, exact = [], []
    for placement, weight in weights.items():
        linear = placement.name
        error = lab.gradients(batches, {linear: option(name, "wgrad")})[1][linear] - base[linear]
        found = shards[weight].inverse_d_and_update()
        assert found is not None
        exact.append(float((error / found[0].view_as(error)).norm()))
        row, col = factors[placement].row, factors[placement].col
        factored.append(float((row[:, None] * error * col).norm()))
    return Agreement.of(np.array(factored), np.array(exact))


def _under_plan(
    lab: Lab, batches: Sequence[Any], snip: SnipConfig, exact: StatisticsTable, name: str
) -> dict[str, Agreement]:
    """Compare statistics observed under a plan with those observed in BF16."""
    chosen = np.random.default_rng(0).permutation(len(lab.names))[: int(0.75 * len(lab.names))]
    plan = {lab.names[i]: Option.uniform(name) for i in chosen}
    under = lab.statistics(batches, snip, plan, all_tokens=True)
    found = {}
    for field in fields(FormatStatistics):
        a, b = (
            np.array([getattr(s.formats[name], field.name) for s in table.linears])
            for table in (under, exact)
        )
        found[field.name] = Agreement.of(a, b)
    return found


def summarize(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return medians over checkpoints, and the worst rank correlation."""

    def median(pick: Callable[[Mapping[str, Any]], float]) -> float:
        return round(float(np.median([pick(r) for r in results])), 3)

    summary: dict[str, Any] = {}
    for gemm in GEMMS:
        of_gemm = {
            key: {
                "spearman": median(lambda r, g=gemm, k=key: r[g]["scores"][k].spearman),
                "worst": round(min(r[gemm]["scores"][key].spearman for r in results), 3),
                "ratio": median(lambda r, g=gemm, k=key: r[g]["scores"][k].ratio),
            }
            for key in results[0][gemm]["scores"]
        }
        summary[gemm] = {
            "size": median(lambda r, g=gemm: r[g]["size"]),
            "sample": median(lambda r, g=gemm: r[g]["sample"]),
            "scores": of_gemm,
        }
    for kind in TERMS:
        summary[kind] = {
            key: {
                "spearman": median(lambda r, k=key, kind=kind: r[kind][k].spearman),
                "ratio": median(lambda r, k=key, kind=kind: r[kind][k].ratio),
            }
            for key in results[0][kind]
        }
    return summary


def main(argv: list[str] | None = None) -> int:
    """Run, print tables, write a summary."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="one shape, two checkpoints")
    parser.add_argument("--bf16", action="store_true", help="BF16 compute instead of FP32")
    parser.add_argument("--format", default="fp4", help="format to judge [fp4]")
    parser.add_argument("--microbatches", type=int, default=2, help="of an iteration [2]")
    parser.add_argument("--output", type=Path, default=RESULTS / "fidelity.json", metavar="FILE")
    args = parser.parse_args(argv)
    shapes = SHAPES[:1] if args.quick else SHAPES
    checkpoints = CHECKPOINTS[:2] if args.quick else CHECKPOINTS
    results = []
    for shape in shapes:
        values = {**shape, "bf16": args.bf16, "train_iters": checkpoints[-1] + 64}
        with open_lab(values) as lab:
            for checkpoint in checkpoints:
                lab.train(checkpoint - lab.step)
                results.append(judge(lab, args.format, args.microbatches))
                print(f"{shape} iteration {checkpoint}", file=sys.stderr)
    summary = summarize(results)
    _show(summary)
    row = {"format": args.format, "compute": "bf16" if args.bf16 else "fp32"}
    row |= {"microbatches": args.microbatches, "checkpoints": len(results)}
    write_result(args.output, {**row, **summary})
    return 0


def _show(summary: Mapping[str, Any]) -> None:
    console = Console(width=100)
    table = Table("score", *GEMMS, title="change of the AdamW update: Spearman (worst), ratio")
    for key in summary["linear"]["scores"]:
        cells = []
        for gemm in GEMMS:
            s = summary[gemm]["scores"][key]
            cells.append(f"{s['spearman']:.2f} ({s['worst']:.2f}) {s['ratio']:.3g}")
        table.add_row(key, *cells)
    table.add_row("weight divergence, sample", *(f"{summary[g]['sample']:.2f}" for g in GEMMS))
    table.add_row("size of the change, all linears", *(f"{summary[g]['size']:.3f}" for g in GEMMS))
    console.print(table)
    for kind in TERMS:
        table = Table("term", "Spearman", "ratio", title=kind)
        for key, s in summary[kind].items():
            table.add_row(key, f"{s['spearman']:.2f}", f"{s['ratio']:.3g}")
        console.print(table)


if __name__ == "__main__":
    sys.exit(main())

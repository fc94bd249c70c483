"""Do divergences add up over linears? Random subsets in FP4, measured and predicted.

    python -m benchmarks.additivity [--format fp4] [--subsets 12] [--json FILE]

At each checkpoint random subsets of a quarter, half and three quarters of the linears, and of the
same share of single GEMMs, are quantized together. The truth is the change of the loss on the
measured and on held-out text, and of the next AdamW update. For each way of joining the linears'
terms the table shows Spearman's rank correlation among subsets of equal size (what a planner at a
given target chooses between) and the median of predicted over measured, means over refreshes with
different random numbers: a probe is a draw.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy.stats import spearmanr

from benchmarks.lab import Lab, open_lab
from benchmarks.machine import RESULTS, write_result
from megatron_snip.config import SnipConfig
from megatron_snip.options import BF16, Option
from megatron_snip.statistics.records import FormatStatistics, StatisticsTable

SHAPE = {"num_layers": 6, "bf16": False}
CHECKPOINTS = (100, 250)
SHARES = (0.25, 0.5, 0.75)
MICROBATCHES = 2
HELD_OUT = 8
DRAWS = 3

Chosen = dict[str, Option]
Terms = list[tuple[FormatStatistics, Option]]

LOSS_JOINS: dict[str, Callable[[Terms], float]] = {
    "sum of first + fisher (signed)": lambda t: sum(s.first + s.fisher for s, _ in _fprop(t)),
    "sum of |first| + fisher": lambda t: sum(abs(s.first) + s.fisher for s, _ in _fprop(t)),
    "sum of mean |first| + fisher": lambda t: sum(s.first_abs + s.fisher for s, _ in _fprop(t)),
    "sum of fisher": lambda t: sum(s.fisher for s, _ in _fprop(t)),
    "sum of aligned fisher": lambda t: sum(s.aligned_fisher for s, _ in _fprop(t)),
}
"""Ways to predict a subset's loss change from its linears' terms."""

WEIGHT_JOINS: dict[str, Callable[[Terms], float]] = {
    "root of the sum of squares": lambda t: math.sqrt(sum(_square(s, o) for s, o in t)),
    "sum of norms": lambda t: sum(math.sqrt(_square(s, o)) for s, o in t),
    "root of squares, wgrad only": lambda t: math.sqrt(
        sum(s.local_square for s, o in t if o.wgrad != "bf16")
    ),
}
"""Ways to predict the change of a subset's update."""


def _fprop(terms: Terms) -> Terms:
    return [(s, o) for s, o in terms if o.fprop != "bf16"]


def _square(s: FormatStatistics, option: Option) -> float:
    total = s.forward_square if option.fprop != "bf16" else 0.0
    total += s.backward_square if option.dgrad != "bf16" else 0.0
    return total + (s.local_square if option.wgrad != "bf16" else 0.0)


def subsets(
    names: Sequence[str], name: str, share: float, count: int, by_gemm: bool, seed: int
) -> list[Chosen]:
    """Return `count` random choices of a share of the linears, or of their GEMMs."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        taken = np.zeros((len(names), 3), dtype=bool)
        if by_gemm:
            flat = rng.permutation(taken.size)[: round(share * taken.size)]
            taken.reshape(-1)[flat] = True
        else:
            taken[rng.permutation(len(names))[: round(share * len(names))]] = True
        found.append(
            {
                linear: Option(*(name if t else "bf16" for t in row))
                for linear, row in zip(names, taken, strict=True)
                if row.any()
            }
        )
    return found


def judge(lab: Lab, config: SnipConfig, name: str, count: int) -> list[dict[str, Any]]:
    """Return, for each kind, share and draw, predictions and truths of its subsets."""
    batches = lab.microbatches(MICROBATCHES)
    held_out = lab.microbatches(HELD_OUT, held_out=True)
    tables = [
        lab.statistics(batches, config.model_copy(update={"seed": config.seed + draw}))
        for draw in range(DRAWS)
    ]
    loss, gradients = lab.gradients(batches)
    updates = lab.updates(gradients)
    unseen = lab.losses(held_out).mean()
    rows = []
    for by_gemm in (False, True):
        for share in SHARES:
            chosen = subsets(lab.names, name, share, count, by_gemm, seed=lab.step)
            truths = []
            for options in track(chosen, f"step {lab.step}, {share:.0%}", transient=True):
                new_loss, new_gradients = lab.gradients(batches, options)
                changed = lab.updates(new_gradients)
                square = sum(
                    float((changed[k] - u).square().sum() / u.square().sum())
                    for k, u in updates.items()
                )
                unseen_change = float(lab.losses(held_out, options).mean() - unseen)
                truths.append((new_loss - loss, unseen_change, math.sqrt(square)))
            rows += [
                {
                    "step": lab.step,
                    "kind": "gemm" if by_gemm else "linear",
                    "share": share,
                    "draw": draw,
                    "truth": np.array(truths).T.tolist(),
                    "predicted": predictions(table, name, chosen),
                }
                for draw, table in enumerate(tables)
            ]
    return rows


def predictions(
    table: StatisticsTable, name: str, chosen: Sequence[Chosen]
) -> dict[str, list[float]]:
    """Return every join's prediction of every subset."""
    by_name = {linear.name: linear.formats[name] for linear in table.linears}
    terms = [[(by_name[k], o) for k, o in options.items() if o != BF16] for options in chosen]
    joins = {**LOSS_JOINS, **WEIGHT_JOINS}
    return {key: [join(t) for t in terms] for key, join in joins.items()}


def summarize(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the mean Spearman and the median ratio of every join against what it predicts."""
    summary = {}
    for key in [*LOSS_JOINS, *WEIGHT_JOINS]:
        targets = {"loss": 0, "held-out loss": 1} if key in LOSS_JOINS else {"update": 2}
        for target, index in targets.items():
            ranks, ratios = [], []
            for row in rows:
                predicted, truth = np.array(row["predicted"][key]), np.array(row["truth"][index])
                ranks.append(float(spearmanr(predicted, truth)[0]))
                ratios += list(predicted / truth)
            summary[f"{key} / {target}"] = {
                "spearman": float(np.mean(ranks)),
                "spearman_by_linear": float(np.mean(ranks[: len(ranks) // 2])),
                "median_ratio": float(np.median(ratios)),
            }
    return summary


def main(argv: list[str] | None = None) -> int:
    """Run, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--format", default="fp4", help="the format of the subsets")
    parser.add_argument("--subsets", type=int, default=12, help="of each kind and share")
    parser.add_argument("--json", type=Path, default=RESULTS / "additivity.json", metavar="FILE")
    args = parser.parse_args(argv)
    config = SnipConfig(formats=(args.format,), probe_relative_step=0.003, probes=4)
    rows: list[dict[str, Any]] = []
    with open_lab({**SHAPE, "train_iters": CHECKPOINTS[-1] + 32}) as lab:
        for checkpoint in CHECKPOINTS:
            lab.train(checkpoint - lab.step)
            rows += judge(lab, config, args.format, args.subsets)
    rows.sort(key=lambda row: row["kind"] == "gemm")
    summary = summarize(rows)
    table = Table("join / what it predicts", "Spearman", "by linear", "predicted / measured")
    for key, value in summary.items():
        table.add_row(
            key,
            f"{value['spearman']:.2f}",
            f"{value['spearman_by_linear']:.2f}",
            f"{value['median_ratio']:.2f}",
        )
    Console(width=110).print(table)
    write_result(args.json, {"format": args.format, "shape": SHAPE, "joins": summary, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())

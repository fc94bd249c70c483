"""How well do the first microbatches of a batch stand for all of them?

    python -m benchmarks.batch [--microbatches 128] [--output FILE]

One model is trained (benchmarks/lab.py). At each checkpoint the same batch is measured several
times: its first 8, 16, 32 microbatches, and all. A job measures the first `MOST_MICROBATCHES`. Each
is compared with the measurement of all:

    ratio       quality loss of a linear in FP4: the smallest and the largest ratio over linears
    spearman    rank correlation of these quality losses
    excess      quality loss of the plan at 75 %, by the measurement of all, over that of the plan
                which that measurement gives, less 1
    largest     share of the linear that has the largest quality loss by all
    seconds     forward and backward of the batch, so many of its microbatches measured

A single microbatch with a large gradient can carry most of a linear's quality loss. If it is not
among the first ones, the ratios are far from 1; "all" is a sample of the training text, too.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr

from benchmarks.lab import Lab, open_lab
from benchmarks.machine import RESULTS, write_result
from megatron_snip.config import SnipConfig
from megatron_snip.divergence.quality_loss import (
    DivergenceTable,
    divergence_table,
    planning_problem,
)
from megatron_snip.options import Option
from megatron_snip.planning.planner import make_plan
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.statistics import sample
from megatron_snip.statistics.records import StatisticsTable
from megatron_snip.trainer.data import Batch

MODEL = {"num_layers": 6, "micro_batch_size": 2}
CHECKPOINTS = (20, 60, 120)
MEASURED = (8, 16, 32)
TARGET = 0.75
SNIP = SnipConfig(formats=("fp8", "fp4"))


def measure(lab: Lab, batches: Sequence[Batch], most: int) -> tuple[StatisticsTable, float]:
    """Return statistics of a batch's first microbatches, and the seconds that it took."""
    begin = time.perf_counter()
    with patch.object(sample, "MOST_MICROBATCHES", most):
        statistics = lab.statistics(batches, SNIP)
    return statistics, time.perf_counter() - begin


def divergences(statistics: StatisticsTable) -> DivergenceTable:
    """Return the divergences of every linear by a measurement."""
    return divergence_table(statistics, SNIP.options, "fp4", SNIP)


def quality_losses(table: DivergenceTable) -> np.ndarray:
    """Return the quality loss of FP4 at each linear."""
    fp4 = Option.uniform("fp4")
    return np.array([options[fp4].quality_loss for options in table.linears.values()])


def judge(lab: Lab, num_microbatches: int) -> list[dict[str, Any]]:
    """Return a row for each number of measured microbatches, at the lab's present checkpoint."""
    batches = lab.microbatches(num_microbatches)
    statistics, seconds_of_all = measure(lab, batches, num_microbatches)
    complete = divergences(statistics)
    wanted = quality_losses(complete)
    largest = int(wanted.argmax())

    def cost_of_plan(table: DivergenceTable) -> float:
        """By the measurement of all, the quality loss of the plan that a table gives."""
        plan = make_plan(planning_problem(table, TARGET), PlanSettings())
        options = complete.linears
        return sum(options[name][own].quality_loss or 0.0 for name, own in plan.linears.items())

    least = cost_of_plan(complete)
    rows: list[dict[str, Any]] = []
    share = float(wanted[largest] / wanted.sum())
    rows.append({"measured": num_microbatches, "largest": share, "seconds": seconds_of_all})
    rows.append({"measured": 0, "seconds": measure(lab, batches, 0)[1]})
    for most in MEASURED:
        statistics, seconds = measure(lab, batches, most)
        table = divergences(statistics)
        found = quality_losses(table)
        ratio = found / wanted
        rows.append(
            {
                "measured": most,
                "ratio": [float(ratio.min()), float(ratio.max())],
                "spearman": float(spearmanr(found, wanted)[0]),
                "excess": cost_of_plan(table) / least - 1.0,
                "largest": float(found[largest] / found.sum()),
                "seconds": seconds,
            }
        )
    return [{"iteration": lab.step, **row} for row in rows]


def main(argv: list[str] | None = None) -> int:
    """Run, print a table, write the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--microbatches", type=int, default=128, help="of the batch [128]")
    parser.add_argument("--output", type=Path, default=RESULTS / "batch.json", metavar="FILE")
    args = parser.parse_args(argv)
    if args.microbatches <= max(MEASURED):
        parser.error(f"--microbatches {args.microbatches}: give more than {max(MEASURED)}")
    rows = []
    # An iteration has four microbatches, so the batch has those of iterations to come.
    train_iters = CHECKPOINTS[-1] + args.microbatches
    with open_lab({**MODEL, "train_iters": train_iters}) as lab:
        for checkpoint in CHECKPOINTS:
            lab.train(checkpoint - lab.step)
            rows += judge(lab, args.microbatches)
    _show(rows)
    write_result(args.output, {"microbatches": args.microbatches, "rows": rows})
    return 0


def _show(rows: Sequence[dict[str, Any]]) -> None:
    table = Table("iteration", "measured", "ratio", "spearman", "excess", "largest", "seconds")
    for row in rows:
        cells = [str(row["iteration"]), str(row["measured"])]
        if "ratio" in row:
            low, high = row["ratio"]
            cells += [f"{low:.2f} to {high:.2f}", f"{row['spearman']:.3f}", f"{row['excess']:.2%}"]
        else:
            cells += ["", "", ""]
        cells.append(f"{row['largest']:.2f}" if "largest" in row else "")
        table.add_row(*cells, f"{row['seconds']:.1f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    sys.exit(main())

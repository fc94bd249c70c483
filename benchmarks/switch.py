"""What a plan switch costs: the call that applies it, and the step after it.

    python -m benchmarks.switch [--rounds N] [--json FILE]

A plan is data of the next step's calls, so a switch should compile nothing and wait for nothing.
Three things are timed in the embedded trainer: steps that keep their plan, steps right after a
switch to a plan that has run before, and the very first step of each plan (on a GPU: loading its
kernels). Plans differ in every linear.

Goal: a step after a switch costs at most one ordinary step more (about none).
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.lab import Lab, open_lab
from benchmarks.machine import has_gpu, write_result
from benchmarks.step import CPU_MODELS, GPU_MODELS
from megatron_snip.options import Option

BLOCK = 4
"""Steps under a plan before the next switch; the first is the one after the switch."""


def run(rounds: int, gpu: bool) -> dict[str, Any]:
    """Return times and the ratio."""
    values = next(iter((GPU_MODELS if gpu else CPU_MODELS).values()))
    settings: dict[str, Any] = {k: v for k, v in values.items() if k != "heads"}
    settings |= {
        "num_attention_heads": values["heads"],
        "num_query_groups": values["heads"],
        "global_batch_size": values["micro_batch_size"],
        "bf16": True,
        "train_iters": 2 * BLOCK * rounds + 32,
    }
    clock = _gpu_seconds if gpu else _cpu_seconds
    with open_lab(settings) as lab:
        first, apply_s, after, steady = {}, [], [], []
        plans = {name: dict.fromkeys(lab.names, Option.uniform(name)) for name in ("fp8", "fp4")}
        for name, plan in plans.items():
            first[name] = clock(_step(lab, plan))
            lab.train(1, plan)
        for _ in range(rounds):
            for plan in plans.values():
                apply_s.append(_applied(lab, plan))
                times = [clock(_step(lab, plan)) for _ in range(BLOCK)]
                after.append(times[0])
                steady += times[1:]
        linears = len(lab.names)
        lab.model.uninstall()
    ordinary, following = statistics.median(steady), statistics.median(after)
    extra = (following - ordinary) / ordinary
    return {
        "model": values,
        "linears": linears,
        "apply_seconds": statistics.median(apply_s),
        "step_seconds": ordinary,
        "step_after_switch_seconds": following,
        "first_step_seconds": first,
        "extra_steps": extra,
        "goals": [
            {
                "name": "extra of the step after a switch, in ordinary steps",
                "value": extra,
                "most": 1.0,
                "met": extra <= 1.0,
            }
        ],
    }


def _step(lab: Lab, plan: dict[str, Option]) -> Callable[[], Any]:
    return lambda: lab.train(1, plan)


def _applied(lab: Lab, plan: dict[str, Option]) -> float:
    """Seconds of the call that every rank makes between two steps."""
    begin = time.perf_counter()
    lab.model.apply(plan)
    return time.perf_counter() - begin


def _cpu_seconds(work: Callable[[], Any]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def _gpu_seconds(work: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def show(report: dict[str, Any], console: Console) -> None:
    """Print a table."""
    table = Table("plan switch", "ms", title=f"{report['linears']} linears, fp8 and fp4 in turn")
    table.add_row("applying the plan", f"{report['apply_seconds'] * 1e3:.3f}")
    table.add_row("step that keeps its plan", f"{report['step_seconds'] * 1e3:.1f}")
    table.add_row("step after a switch", f"{report['step_after_switch_seconds'] * 1e3:.1f}")
    for name, seconds in report["first_step_seconds"].items():
        table.add_row(f"the run's first step in {name}", f"{seconds * 1e3:.1f}")
    console.print(table)
    console.print(f"a switch costs {report['extra_steps']:.3f} ordinary steps (goal <= 1)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, help="switches to each plan [10; 4 on the CPU]")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    gpu = has_gpu()
    if not gpu:
        torch.set_num_threads(1)
    report = run(args.rounds or (10 if gpu else 4), gpu)
    show(report, Console())
    if args.json:
        write_result(args.json, report)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

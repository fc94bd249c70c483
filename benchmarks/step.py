"""One training step of a Llama stack under BF16, FP8 and a plan with 75 % of its FLOPs in FP4.

    python -m benchmarks.step [--rounds N] [--json FILE]

A step is timed (forward, backward, optimizer) in the embedded trainer, one rank, with simulated
linears. On a GPU the layers are those of Llama-7B; on the CPU those of the demo and of half its
width. What exceeds 75 % runs in fp8, spread evenly over the model. `peak_bytes` is the most memory
that a step holds, `held_bytes` what is held before it begins.

The embedded trainer's attention is Megatron's own unfused one, which keeps 6 bytes for every pair
of tokens and head: short sequences, many at once, keep it from filling the GPU and the time.

Goal (time over BF16's): 75 % FP4 <= 1.5 on the CPU and <= 1.3 on a GPU.
"""

from __future__ import annotations

import argparse
import os
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
from benchmarks.timing import seconds_by_turns
from megatron_snip.options import Option

CPU_MODELS: dict[str, dict[str, int]] = {
    "demo": {
        "num_layers": 4,
        "hidden_size": 256,
        "ffn_hidden_size": 512,
        "seq_length": 128,
        "micro_batch_size": 8,
        "heads": 4,
    },
    "half the demo's width": {
        "num_layers": 4,
        "hidden_size": 128,
        "ffn_hidden_size": 256,
        "seq_length": 128,
        "micro_batch_size": 8,
        "heads": 4,
    },
}
GPU_MODELS: dict[str, dict[str, int]] = {
    "two layers of Llama-7B": {
        "num_layers": 2,
        "hidden_size": 4096,
        "ffn_hidden_size": 11008,
        "seq_length": 1024,
        "micro_batch_size": 8,
        "heads": 32,
    },
}
Keeper = Callable[[dict[str, Any]], None]
FP8, FP4 = Option.uniform("fp8"), Option.uniform("fp4")


def plans(lab: Lab) -> dict[str, dict[str, Option]]:
    """Return name -> option of every linear that is not bf16."""
    mixed = three_quarters(lab)
    return {"bf16": {}, "fp8": dict.fromkeys(lab.names, FP8), "75% fp4": mixed}


def three_quarters(lab: Lab) -> dict[str, Option]:
    """Return a plan of at least 75 % of the linears' FLOPs in fp4, the rest in fp8, spread evenly.

    Going through the model, a linear gets fp4 unless the share is ahead of 75 % already.
    """
    plan: dict[str, Option] = {}
    low = total = 0.0
    for info in lab.model.job.linears:
        total += info.flops_per_token
        plan[info.name] = FP8 if low >= 0.75 * total else FP4
        low += info.flops_per_token if plan[info.name] == FP4 else 0.0
    return plan


def measure(values: dict[str, int], rounds: int, gpu: bool, keep: Keeper) -> None:
    """Hand times and ratios of one model to `keep`."""
    heads = values["heads"]
    settings: dict[str, Any] = {k: v for k, v in values.items() if k != "heads"}
    settings |= {
        "num_attention_heads": heads,
        "num_query_groups": heads,
        "global_batch_size": values["micro_batch_size"],
        "bf16": True,
        "train_iters": 8 * rounds + 32,
    }
    result: dict[str, Any] = {
        "model": values,
        "seconds": {},
        "recipes": {},
        "peak_bytes": {},
        "held_bytes": {},
        "failures": {},
    }
    with open_lab(settings) as lab:
        _measure(lab, rounds, gpu, result)
    seconds = result["seconds"]
    if "bf16" in seconds:
        result["over_bf16"] = {n: time_s / seconds["bf16"] for n, time_s in seconds.items()}
    result["goals"] = _goals(result.get("over_bf16", {}), gpu)
    keep(result)


def _measure(lab: Lab, rounds: int, gpu: bool, result: dict[str, Any]) -> None:
    runs: dict[str, Callable[[], Any]] = {n: _step(lab, plan) for n, plan in plans(lab).items()}
    times = seconds_by_turns(runs, rounds, gpu)
    for name, time_s in times.seconds.items():
        label = _label(name)
        result["seconds"][label] = time_s
        runs[name]()
        recipes = sorted({linear.recipe for linear in lab.model.linears})
        result["recipes"][label] = "/".join(recipes)
        if gpu:
            result["held_bytes"][label], result["peak_bytes"][label] = _memory(runs[name])
    result["failures"] |= {_label(name): why for name, why in times.failed.items()}


def _label(plan: str) -> str:
    return plan if plan == "bf16" else f"{plan}, simulate"


def _step(lab: Lab, plan: dict[str, Option]) -> Callable[[], Any]:
    return lambda: lab.train(1, plan)


def _memory(run: Callable[[], Any]) -> tuple[int, int]:
    """Bytes held before a step, and the most held in it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = int(torch.cuda.memory_allocated())
    run()
    return held, int(torch.cuda.max_memory_allocated())


def _goals(over: dict[str, float], gpu: bool) -> list[dict[str, Any]]:
    most = {"75% fp4, simulate": 1.3 if gpu else 1.5}
    return [
        {"name": f"{name} / bf16", "value": over[name], "most": limit, "met": over[name] <= limit}
        for name, limit in most.items()
        if name in over
    ]


def run(rounds: int, gpu: bool, keep: Keeper = lambda _: None) -> dict[str, Any]:
    """Return the whole result.

    Args:
        rounds: timed steps of each plan.
        gpu: the large models.
        keep: called with what there is so far, after every model.
    """
    report: dict[str, Any] = {"models": {}}
    for name, values in (GPU_MODELS if gpu else CPU_MODELS).items():

        def add(result: dict[str, Any], name: str = name) -> None:
            report["models"][name] = result
            report["goals"] = [
                {**goal, "name": f"{goal['name']}, {model}"}
                for model, found in report["models"].items()
                for goal in found["goals"]
            ]
            keep(report)

        measure(values, rounds, gpu, add)
    return report


def show(report: dict[str, Any], console: Console) -> None:
    """Print a table a model."""
    for name, result in report["models"].items():
        table = Table(title=f"one training step, {name}")
        for column in ("plan", "linears run", "ms", "over bf16", "goal", "peak, GiB"):
            table.add_column(
                column, justify="left" if column in ("plan", "linears run") else "right"
            )
        goals = {goal["name"]: goal for goal in result["goals"]}
        for plan, seconds in result["seconds"].items():
            goal = goals.get(f"{plan} / bf16")
            style = "" if goal is None else "green" if goal["met"] else "red"
            bound = "" if goal is None else f"<= {goal['most']}"
            over = result.get("over_bf16", {}).get(plan)
            ratio = "" if over is None else f"{over:.2f}"
            recipe = result["recipes"].get(plan, "")
            peak = result["peak_bytes"].get(plan)
            most = "" if peak is None else f"{peak / 2**30:.1f}"
            row = (plan, recipe, f"{seconds * 1e3:.1f}", ratio, bound, most)
            table.add_row(*row, style=style)
        console.print(table)
        for plan, why in result["failures"].items():
            console.print(f"{plan} failed: {why}", markup=False, style="red")


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, help="timed steps of each plan [10; 5 on the CPU]")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    gpu = has_gpu()
    if not gpu:
        torch.set_num_threads(1)

    def keep(report: dict[str, Any]) -> None:
        if args.json:
            write_result(args.json, report)

    report = run(args.rounds or (10 if gpu else 5), gpu, keep)
    show(report, Console())
    return 1 if any(result["failures"] for result in report["models"].values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())

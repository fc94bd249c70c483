"""How long a plan takes, how good it is proven to be, and HiGHS on the same instance.

    python -m benchmarks.solver [--quick] [--output benchmarks/results/solver.json]

Instances have the sizes of Llama-70B (80 layers x 7 linears x 9 options, 8 stages), of Llama-405B
and of a mixture of experts with 10^12 parameters (128 layers x 132 grouped linears x 4 options, 16
stages). Losses are log-normal by GEMM and vary with depth, FLOPs are those of the shapes, the
target is 0.75. One thread each. `seconds` is the whole of `make_plan`, from the problem's record
to a plan that was validated; HiGHS (scipy.optimize.milp) gets its matrices ready-made and is asked
for a gap of 1e-3 only. A ratio below 1 says that planning here is the faster one. On a machine that
does other work compare CPU seconds. OR-Tools is imported before anything is timed: that takes about
a second, which a run's solver spends when it starts, not when it solves.

The growth table plans for models of 140 to 17,920 linears and fits seconds ~ linears ^ exponent.
"""

from __future__ import annotations

import argparse
import importlib
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import write_result
from megatron_snip.planning.planner import make_plan
from megatron_snip.planning.problem import LinearChoices, OptionCost, PlanningProblem
from megatron_snip.planning.settings import PlanSettings
from tests.unit.planning.oracle import highs_model

GAP = 1e-3
TARGET = 0.75
FORMATS = ("fp8", "fp4")


def dense_model(
    layers: int, hidden: int, ffn: int, kv: int, stages: int, seed: int
) -> PlanningProblem:
    """Return a Llama-like problem: 7 linears a layer, bf16 and every fp8/fp4 combination."""
    random = np.random.default_rng(seed)
    shapes = {
        "self_attention.linear_q": hidden * hidden,
        "self_attention.linear_k": hidden * kv,
        "self_attention.linear_v": hidden * kv,
        "self_attention.linear_proj": hidden * hidden,
        "mlp.linear_gate": hidden * ffn,
        "mlp.linear_up": hidden * ffn,
        "mlp.linear_fc2": hidden * ffn,
    }
    triples = [(a, b, c) for a in FORMATS for b in FORMATS for c in FORMATS]
    linears = []
    for layer in range(layers):
        depth = 2.0 + math.cos(2 * math.pi * layer / layers)
        for module, size in shapes.items():
            by_gemm = random.lognormal(0.0, 1.0, 3) * depth
            options = {"bf16": OptionCost(quality_loss=0.0, saving=0.0)}
            for triple in triples:
                share = np.array([1.0 if name == "fp4" else 0.05 for name in triple])
                loss = float((by_gemm * share).sum() * random.lognormal(0.0, 0.1))
                saving = triple.count("fp4") / 3
                options["-".join(triple)] = OptionCost(quality_loss=loss, saving=saving)
            name = f"decoder.layers.{layer}.{module}"
            stage = layer * stages // layers
            linears.append(LinearChoices(name=name, stage=stage, flops=6.0 * size, options=options))
    return PlanningProblem(linears=tuple(linears), target=TARGET)


def experts_model(layers: int, per_layer: int, stages: int, seed: int) -> PlanningProblem:
    """Return a mixture-of-experts problem: attention's 2 linears and groups of experts' a layer."""
    random = np.random.default_rng(seed)
    linears = []
    for layer in range(layers):
        for k in range(per_layer):
            module = ("self_attention.linear_qkv", "self_attention.linear_proj")[k] if k < 2 else ""
            module = module or f"mlp.experts.{k // 2 - 1}.linear_fc{k % 2 + 1}"
            size = 7168 * 2048 * (1 + (k % 2 == 0)) * float(random.integers(80, 121)) / 100
            scale = float(random.lognormal(0.0, 1.5))
            mixed = 0.4 * scale * float(random.lognormal(0.0, 0.2))
            options = {
                "bf16": OptionCost(quality_loss=0.0, saving=0.0),
                "fp8": OptionCost(quality_loss=0.05 * scale, saving=0.0),
                "fp4-fp8-fp8": OptionCost(quality_loss=mixed, saving=1 / 3),
                "fp4": OptionCost(quality_loss=scale, saving=1.0),
            }
            name = f"decoder.layers.{layer}.{module}"
            stage = layer * stages // layers
            linears.append(LinearChoices(name=name, stage=stage, flops=6.0 * size, options=options))
    return PlanningProblem(linears=tuple(linears), target=TARGET)


MODELS: dict[str, Callable[[int], PlanningProblem]] = {
    "llama-70b": lambda seed: dense_model(80, 8192, 28672, 1024, 8, seed),
    "llama-405b": lambda seed: dense_model(126, 16384, 53248, 1024, 16, seed),
    "moe-1t": lambda seed: experts_model(128, 132, 16, seed),
}


def compare(
    name: str, problem: PlanningProblem, balance: str, seed: int, limit_s: float
) -> dict[str, Any]:
    """Plan with both; return one row."""
    settings = PlanSettings(pipeline_balance=balance, gap=GAP)
    start, cpu = time.perf_counter(), time.process_time()
    plan = make_plan(problem, settings)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    row = {
        "model": name,
        "linears": len(problem.linears),
        "balance": balance,
        "seed": seed,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "status": plan.status,
        "objective": plan.objective,
        "gap": plan.gap,
        "efficiency": plan.efficiency,
    }
    model = highs_model(problem, settings)
    assert model is not None
    solve, _ = model
    start, cpu = time.perf_counter(), time.process_time()
    objective = solve(GAP, limit_s)
    highs_s, highs_cpu_s = time.perf_counter() - start, time.process_time() - cpu
    row |= {
        "highs_seconds": highs_s,
        "highs_cpu_seconds": highs_cpu_s,
        "highs_objective": objective,
        "highs_limit_seconds": limit_s,
        "ratio": seconds / highs_s,
        "cpu_ratio": cpu_seconds / highs_cpu_s,
    }
    return row


def growth(sizes: tuple[int, ...]) -> dict[str, Any]:
    """Plan for ever more layers under stage balance; fit the exponent."""
    rows = []
    for layers in sizes:
        problem = dense_model(layers, 8192, 28672, 1024, max(1, layers // 10), seed=0)
        start, cpu = time.perf_counter(), time.process_time()
        plan = make_plan(
            problem, PlanSettings(pipeline_balance="stage", gap=GAP, time_limit_s=600.0)
        )
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
        rows.append(
            {
                "linears": len(problem.linears),
                "seconds": seconds,
                "cpu_seconds": cpu_seconds,
                "gap": plan.gap,
            }
        )
    logs = [(math.log(row["linears"]), math.log(row["cpu_seconds"])) for row in rows]
    exponent = statistics.linear_regression(*zip(*logs, strict=True)).slope
    return {"rows": rows, "exponent": exponent}


def run(models: list[str], seeds: int, limit_s: float, sizes: tuple[int, ...]) -> dict[str, Any]:
    importlib.import_module("ortools.sat.python.cp_model")
    rows = []
    print("model        linears balance   seconds       gap  HiGHS s  CPU ratio")
    for name in models:
        for balance in ("none", "stage"):
            for seed in range(seeds if name != "moe-1t" else 1):
                row = compare(name, MODELS[name](seed), balance, seed, limit_s)
                rows.append(row)
                print(
                    f"{name:12}{row['linears']:8d} {balance:8}{row['seconds']:9.3f}"
                    f"{row['gap']:10.1e}{row['highs_seconds']:9.2f}{row['cpu_ratio']:11.3f}",
                    flush=True,
                )
    grown = growth(sizes)
    for row in grown["rows"]:
        print(f"{row['linears']:6d} linears  {row['seconds']:8.3f} s  gap {row['gap']:.1e}")
    print(f"CPU seconds grow as linears ^ {grown['exponent']:.2f}")
    return {"comparison": rows, "growth": grown}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="70B only, one seed")
    parser.add_argument("--highs-limit", type=float, default=120.0, metavar="S")
    parser.add_argument("--output", type=Path, metavar="FILE")
    args = parser.parse_args()
    models = ["llama-70b"] if args.quick else list(MODELS)
    sizes = (20, 40, 80) if args.quick else (20, 40, 80, 160, 320, 640, 1280, 2560)
    result = run(models, 1 if args.quick else 3, args.highs_limit, sizes)
    if args.output is not None:
        write_result(args.output, result)


if __name__ == "__main__":
    main()

"""A job of Megatron-LM on Transformer Engine without SNIP, measured, and under plans: time, losses.

    python -m benchmarks.job [pretrain_gpt.py] [--iterations 32] [--only NAMES] [--json FILE]

runs the script (that of the clone $MEGATRON_MAIN by default) once for each case, as users do:
`python -m megatron_snip pretrain_gpt.py ...` in a process of its own, on mock data and one GPU,
with four layers of Llama-7B's width. A case is a recipe of the job (bf16, or an FP8 recipe of
Hopper), and what SNIP does in it:

    off         nothing: no --snip
    measured    --snip-collect-only; from iteration 13 on each second iteration measures all linears
    PLAN        a job runs a plan: half of the FLOPs in fp8, or all of them

Times are what Megatron logs. `installed_ratio` is that of an ordinary iteration of a measured case
to one without SNIP, `measured_ratio` that of an iteration that measures to the ordinary one behind
it. `peak_gib` is the most memory allocated. `same_losses` says whether the measured case logged the
losses and gradient norms that its job logged without SNIP. Without a GPU the models are tiny, and
all jobs BF16. Nothing is run without the script, or on a GPU without Transformer Engine.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.machine import has_gpu, write_result
from tests.distributed.launch import free_port
from tests.megatron.lab import CPU

FIRST_MEASURED = 13
"""After the first iterations, which are slower."""

TIME_LIMIT_S = 120
"""Of a case."""

JOB = """
    --bf16 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0
    --no-gradient-accumulation-fusion --lr 1e-4 --lr-warmup-iters 2 --mock-data --num-workers 0
    --tokenizer-type NullTokenizer --vocab-size 8191 --log-interval 1 --eval-interval 1000
    --eval-iters 0
"""
"""Megatron's output layer fuses the accumulation of its gradient only with apex."""

GPU_MODEL = """
    --num-layers 4 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32
    --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 2 --global-batch-size 2
"""
CPU_MODEL = """
    --num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 2
    --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 2
"""

RECIPES = {
    "bf16": "",
    "fp8 blockwise": "--fp8-format e4m3 --fp8-recipe blockwise",
    "fp8 delayed": "--fp8-format hybrid --fp8-recipe delayed",
    "fp8 tensorwise": "--fp8-format hybrid --fp8-recipe tensorwise",
}
MEASURED = f"""
    --snip --snip-collect-only --snip-start-step {FIRST_MEASURED} --snip-interval 2 --snip-lag 1
"""
PLANS = {
    "half fp8": f"--snip --snip-efficiency-target 0.5 --snip-start-step {FIRST_MEASURED}"
    " --snip-lag 1",
    "all fp8": "--snip --snip-policy uniform-fp8",
}

LINE = re.compile(r" iteration +(\d+)/.*?elapsed time per iteration \(ms\): ([\d.]+)(.*)")
LOSSES = re.compile(r"(?:lm loss|grad norm): (\S+)")
PEAK = re.compile(r"max allocated: ([\d.]+)")


def cases(gpu: bool) -> dict[str, list[str]]:
    """Return the flags of each case; a job's case without SNIP comes before its measured one."""
    found: dict[str, list[str]] = {}
    for recipe, flags in RECIPES.items() if gpu else [("bf16", "")]:
        found[f"{recipe}, off"] = flags.split()
        found[f"{recipe}, measured"] = [*flags.split(), *MEASURED.split()]
    plans = PLANS if gpu else {"half fp8": PLANS["half fp8"]}
    for name, flags in plans.items():
        found[f"bf16, {name}"] = flags.split()
    if gpu:  # the other half is in BF16, whose weights and inputs are larger
        tensorwise = [*RECIPES["fp8 tensorwise"].split(), *PLANS["half fp8"].split()]
        found["fp8 tensorwise, half fp8"] = tensorwise
    return found


def is_wanted(name: str, only: str | None) -> bool:
    """Return whether a case was asked for; a comma before a space is part of a name."""
    return not only or any(part in name for part in re.split(",(?! )", only))


def skipped(script: str | None, gpu: bool) -> str:
    """Return why nothing is run, or an empty text."""
    if not script:
        return "no script: MEGATRON_MAIN is not set"
    if not importlib.util.find_spec("megatron.training"):
        return "no megatron.training: its wheels for Python 3.12 have it"
    if gpu and not importlib.util.find_spec("transformer_engine"):
        return "no Transformer Engine; launch/te.sh brings it"
    return ""


def run(script: str, flags: Sequence[str], iterations: int, gpu: bool, log: Path) -> dict[str, Any]:
    """Run a case; return what it logged.

    Returns:
        `milliseconds` of each iteration, `losses` (those and gradient norms, as logged), `peak_mib`
        and the plans that were applied; or {"failed": the end of its log}.
    """
    start = [sys.executable, "-W", "ignore", "-m", "megatron_snip", *([] if gpu else ["--cpu"])]
    model = GPU_MODEL.split() if gpu else [*CPU_MODEL.split(), *CPU.split()]
    words = [*start, script, *JOB.split(), *model, "--train-iters", str(iterations), *flags]
    words += ["--log-memory-interval", str(iterations)]
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    ranks |= {"MASTER_PORT": str(free_port()), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    ranks |= {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}  # attention's backward: losses are compared
    with tempfile.TemporaryDirectory() as folder, log.open("w") as file:
        words += ["--snip-output-dir", folder] if "--snip" in flags else []
        try:
            status: int | str = subprocess.run(
                words,
                env={**os.environ, **ranks},
                stdout=file,
                stderr=file,
                timeout=TIME_LIMIT_S,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            status = f"not done after {TIME_LIMIT_S} s"
    text = log.read_text()
    rows = LINE.findall(text)
    if status or len(rows) != iterations:
        return {"failed": f"exit status {status}, {len(rows)} iterations; {log}: {text[-1500:]}"}
    return {
        "milliseconds": [float(milliseconds) for _, milliseconds, _ in rows],
        "losses": [LOSSES.findall(rest) for _, _, rest in rows],
        "peak_mib": max(map(float, PEAK.findall(text)), default=0.0),
        "plans": re.findall(r"snip: (iteration \d+: plan .*)", text),
    }


def compare(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return times and ratios of the cases that ran."""
    results: dict[str, dict[str, Any]] = {}
    for name, case in found.items():
        recipe, what = name.split(", ")
        times = case["milliseconds"][FIRST_MEASURED + 1 :]
        off = results.get(f"{recipe}, off")
        result: dict[str, Any] = {"plans": case["plans"]} if case["plans"] else {}
        if what == "measured":
            measured = case["milliseconds"][FIRST_MEASURED - 1 :: 2]
            times = case["milliseconds"][FIRST_MEASURED::2]
            pairs = list(zip(measured, times, strict=False))
            result["measured_ms"] = statistics.median(measured)
            result["measured_ratio"] = statistics.median(m / o for m, o in pairs[1:])
        result["iteration_ms"] = statistics.median(times[1:])
        result["peak_gib"] = case["peak_mib"] / 1024
        if off:
            result["installed_ratio"] = result["iteration_ms"] / off["iteration_ms"]
        if off and what == "measured":
            result["same_losses"] = case["losses"] == found[f"{recipe}, off"]["losses"]
        if "bf16, off" in results:
            result["over_bf16"] = result["iteration_ms"] / results["bf16, off"]["iteration_ms"]
        results[name] = result
    return results


def show(report: dict[str, Any], console: Console) -> None:
    """Print a table of the cases."""
    columns = ("iteration_ms", "over_bf16", "installed_ratio", "measured_ratio")
    columns += ("peak_gib", "same_losses")
    table = Table("case", *columns)
    for name, result in report["cases"].items():
        values = [result.get(column, "") for column in columns]
        table.add_row(name, *(f"{v:.3f}" if isinstance(v, float) else str(v) for v in values))
    console.print(table)
    for name, why in report["failures"].items():
        console.print(f"{name} failed: {why}", markup=False, style="red")


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write; 1 if a case failed, or if measuring changed what a job logs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("script", nargs="?", help="pretrain_gpt.py of a clone of Megatron-LM")
    parser.add_argument("--iterations", type=int, default=32, help="of each case")
    parser.add_argument(
        "--only", help="cases whose names contain one of these; 'A, b,A, c' are two"
    )
    parser.add_argument("--logs", type=Path, default=Path("runs/job"), help="a folder for the logs")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    gpu = has_gpu()
    clone = os.environ.get("MEGATRON_MAIN")
    script = args.script or (clone and f"{clone}/pretrain_gpt.py")
    why = skipped(script, gpu)
    if why:
        if args.json:
            write_result(args.json, {"skipped": why})
        print(f"skipped: {why}")
        return 0
    args.logs.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"model": (GPU_MODEL if gpu else CPU_MODEL).split()}
    report |= {"cases": {}, "failures": {}}
    found: dict[str, dict[str, Any]] = {}
    for name, flags in cases(gpu).items():
        if not is_wanted(name, args.only):
            continue
        log = args.logs / f"{name.replace(', ', '-').replace(' ', '-')}.log"
        case = run(script, flags, args.iterations, gpu, log)
        if "failed" in case:
            report["failures"][name] = case["failed"]
        else:
            found[name] = case
            report["cases"] = compare(found)
        if args.json:
            write_result(args.json, report)
    show(report, Console(width=120))
    changed = any(case.get("same_losses") is False for case in report["cases"].values())
    return int(bool(report["failures"]) or changed)


if __name__ == "__main__":
    raise SystemExit(main())

"""Loss curves of a 125M Llama under BF16, FP8, FP4 plans and the rules that SNIP is compared with.

    python -m benchmarks.curves [--folder DIR] [--json FILE]

Each run trains 1,000 iterations of 16,384 byte tokens from the same seed on the same data, in
simulate. Plans have 75 % of the linears' FLOPs in fp4, or all of them in one format. A run saves
checkpoints: after SNIP_BENCH_SECONDS the run in progress saves one and stops, and the next call
goes on with it. Without a GPU: 16 iterations of a tiny model, which shows that it works.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import has_gpu, write_result
from megatron_snip.planning.policies import POLICIES

RULES = [n for n, policy in POLICIES.items() if policy.granularity != "gemm" and n != "snip"]
"""Policies that choose linears by a rule."""

GPU: dict[str, Any] = {
    "num-layers": 12, "hidden-size": 768, "ffn-hidden-size": 2048, "num-attention-heads": 12,
    "seq-length": 1024, "micro-batch-size": 16, "global-batch-size": 16, "train-iters": 1000,
    "lr": 6e-4, "min-lr": 6e-5, "lr-warmup-iters": 50, "eval-interval": 250, "eval-iters": 8,
    "save-interval": 250, "snip-start-step": 100, "snip-interval": 300,
}  # fmt: skip
CPU: dict[str, Any] = {
    "num-layers": 2, "hidden-size": 128, "ffn-hidden-size": 256, "num-attention-heads": 2,
    "seq-length": 64, "micro-batch-size": 2, "global-batch-size": 2, "train-iters": 16,
    "eval-interval": 16, "eval-iters": 1, "lr-warmup-iters": 2, "max-corpus-bytes": 200000,
    "snip-start-step": 11, "snip-interval": 20,
}  # fmt: skip


def runs(gpu: bool) -> dict[str, list[str]]:
    """Return name -> flags; the most wanted first."""
    plan = ["--snip", "--snip-formats", "fp8,fp4", "--snip-backend", "simulate"]
    found = {"bf16": ["--no-snip"], "fp8": [*plan, "--snip-policy", "uniform-fp8"], "snip": plan}
    found["fp4"] = [*plan, "--snip-policy", "uniform-fp4", "--snip-efficiency-target", "1"]
    for rule in RULES if gpu else RULES[:1]:
        found[rule] = [*plan, "--snip-policy", rule]
    return found


def train(flags: Sequence[str], folder: Path, settings: dict[str, Any], seconds: float) -> None:
    """Start or resume a run; after `seconds` it is asked to save and stop."""
    words = [sys.executable, "-m", "megatron_snip", "train", "--nproc-per-node", "1", *flags]
    for name, value in settings.items():
        words += (
            [f"--{name}", str(value)] if not name.startswith("snip") or "--snip" in flags else []
        )
    saved = str(folder / "checkpoints")
    words += ["--run-dir", str(folder / "run"), "--save", saved, "--load", saved]
    with (folder / "log.txt").open("a") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            process.wait(60.0)


def losses(folder: Path) -> list[float]:
    """Return the training loss of each iteration so far."""
    file = folder / "run" / "metrics.jsonl"
    rows = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    return [row["loss"] for row in rows if "loss" in row]


def main(argv: Sequence[str] | None = None) -> int:
    """Train what time allows; 1 if a run ended before its last iteration by itself."""
    gpu = has_gpu()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/curves"), help="of the runs")
    parser.add_argument("--json", type=Path, help="write the curves here")
    args = parser.parse_args(argv)
    end = time.monotonic() + float(os.environ.get("SNIP_BENCH_SECONDS", "1e9")) - 60.0
    settings = GPU if gpu else CPU
    report: dict[str, Any] = {"settings": settings, "losses": {}, "failures": {}}
    for name, flags in runs(gpu).items():
        folder = args.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        begin, before = time.monotonic(), len(losses(folder))
        if before < settings["train-iters"] and end - begin > 20.0:
            train(flags, folder, settings, end - begin)
        curve = report["losses"][name] = losses(folder)
        if len(curve) < settings["train-iters"]:
            report["unfinished"] = True
            if time.monotonic() < end and end - begin > 20.0:
                report["failures"][name] = f"see {folder / 'log.txt'}"
        print(f"{name}: {len(curve)} iterations, loss {curve[-1] if curve else float('nan'):.4f}")
        if args.json:
            write_result(args.json, report)
    return int(bool(report["failures"]))


if __name__ == "__main__":
    raise SystemExit(main())

"""Layers of Transformer Engine in turns in one process: jobs, plans, and its own statistics.

    python -m benchmarks.layers fp8|gemms|inspect [--rounds N] [--json FILE]

A model with layers of Llama-7B's width makes forward and backward passes, without an optimizer.
What is compared takes turns, iteration by iteration, so that a drift of the clock meets all of it:

    fp8      for each recipe, tensorwise first: a job in FP8 as Megatron runs it; the same job
             under a plan of all FP8; a BF16 job under that plan
    gemms    one layer under options per linear (bf16, fp8) and per GEMM, against what the latter
             would take if a GEMM's time did not depend on the other two: thirds of the former
    inspect  the FP8 job with nvdlfw-inspect's LogFp8TensorStats in each second iteration: what
             statistics of another tool cost in the same place

A ratio is the median over pairs of iterations that are next to each other, with its 95 % interval.
`peak_bytes` of a job is what it holds between iterations and the most that one adds.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

from benchmarks.machine import has_gpu, write_result
from megatron_snip.linears.runtime import MicrobatchTokens

if has_gpu():
    os.environ.setdefault("SNIP_TE_REAL", "1")  # tests.models builds on the GPU

import torch

from benchmarks.refresh import median_interval
from benchmarks.timing import Times, said, seconds_by_turns
from tests import models

WIDE = {
    "hidden_size": 4096,
    "ffn_hidden_size": 11008,
    "num_attention_heads": 32,
    "num_query_groups": 32,
    "use_cpu_initialization": False,  # on a CPU it takes longer than all that is timed
}
SEQUENCE = 2048
"""On a GPU; a microbatch has two sequences. On a CPU shapes are those of the tests."""

RECIPES = {
    "tensorwise": ({"fp8": "hybrid", "fp8_recipe": "tensorwise"}, "fp8_tensorwise_hybrid"),
    "blockwise": ({"fp8": "e4m3", "fp8_recipe": "blockwise"}, "fp8_blockwise"),
}
"""{name: (settings of Megatron's FP8 job, what a plan for a BF16 job calls the format)}."""

JOB, PLANNED, FROM_BF16 = "FP8 job", "FP8 job, plan of all FP8", "BF16 job, plan of all FP8"
PER_GEMM = ("fp8-fp8-bf16", "fp8-bf16-bf16", "bf16-fp8-fp8")

INSPECT = """
statistics:
  enabled: True
  layers:
    layer_name_regex_pattern: .*
  transformer_engine:
    LogFp8TensorStats:
      enabled: True
      tensors: [activation, gradient, weight]
      stats: ["underflows%", "mse"]
      freq: 2
"""
"""The statistics that are nearest to those of SNIP."""


@dataclass(frozen=True)
class Way:
    """A job.

    Attributes:
        changes: settings of its TransformerConfig.
        option: of all linears, in SNIP's words; None without SNIP.
    """

    changes: Mapping[str, Any] = field(default_factory=dict)
    option: str | None = None


class Job:
    """A model in training, with what it holds."""

    def __init__(self, way: Way, num_layers: int) -> None:
        before = _allocated()
        shape = WIDE if has_gpu() else {}
        self.model = models.build(num_layers=num_layers, **shape, **way.changes)
        if way.option is not None:
            tokens = models.SEQUENCE * models.BATCH
            models.planned(self.model, way.option, tokens=MicrobatchTokens(tokens))
        self.losses: list[float] = []
        self.iterate()
        self.model.zero_grad(set_to_none=True)
        self.held_bytes = _allocated() - before

    def iterate(self) -> None:
        """Make a forward and backward pass."""
        self.model.zero_grad(set_to_none=True)
        self.losses += models.losses(self.model, 1)

    def peak_bytes(self) -> int:
        """Return the most memory that the job alone needs; 0 without a GPU."""
        self.model.zero_grad(set_to_none=True)
        if not has_gpu():
            return 0
        torch.cuda.reset_peak_memory_stats()
        before = _allocated()
        self.iterate()
        self.model.zero_grad(set_to_none=True)
        return self.held_bytes + int(torch.cuda.max_memory_allocated()) - before


def _allocated() -> int:
    return int(torch.cuda.memory_allocated()) if has_gpu() else 0


def in_turns(ways: Mapping[str, Way], rounds: int, num_layers: int) -> tuple[Times, dict[str, Any]]:
    """Return the times, and seconds, losses, memory and failures of the ways for the report."""
    if has_gpu():
        models.SEQUENCE = SEQUENCE
    jobs: dict[str, Job] = {}
    failures: dict[str, str] = {}
    for name, way in ways.items():
        try:
            jobs[name] = Job(way, num_layers)
        except Exception as error:  # the other ways go on
            failures[name] = said(error)
    times = seconds_by_turns({n: job.iterate for n, job in jobs.items()}, rounds, has_gpu())
    done = {name: jobs[name] for name in times.seconds}
    report = {
        "seconds": times.seconds,
        "loss": {name: job.losses[0] for name, job in done.items()},
        "peak_bytes": {name: job.peak_bytes() for name, job in done.items()},
        "failures": failures | times.failed,
    }
    return times, report


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> dict[str, Any]:
    """Return the median of the quotients, and its 95 % interval."""
    quotients = [a / b for a, b in zip(numerator, denominator, strict=True)]
    return {"ratio": statistics.median(quotients), "interval": median_interval(quotients)}


def fp8(rounds: int) -> dict[str, Any]:
    """Compare a plan of all FP8 with Megatron's own FP8 job."""
    report: dict[str, Any] = {"recipes": {}, "failures": {}, "goals": []}
    for recipe, (changes, name) in RECIPES.items():
        ways = {JOB: Way(changes), PLANNED: Way(changes, "fp8"), FROM_BF16: Way({}, name)}
        times, found = in_turns(ways, rounds, num_layers=4)
        report["failures"] |= {f"{recipe}, {k}": v for k, v in found.pop("failures").items()}
        report["recipes"][recipe] = found
        if JOB not in times.seconds:
            continue
        own = times.runs[JOB]
        found["over_job"] = {n: ratio(runs, own) for n, runs in times.runs.items() if n != JOB}
        found["same_loss"] = found["loss"].get(PLANNED) == found["loss"][JOB]
        for way, over in found["over_job"].items():
            value = over["ratio"]
            goal = {"name": f"{recipe}, {way} / {JOB}", "value": value, "most": 1.02}
            report["goals"].append({**goal, "met": value <= 1.02})
    return report


def gemms(rounds: int) -> dict[str, Any]:
    """Compare options per GEMM with what options per linear make of them."""
    names = ("bf16", "fp8", *PER_GEMM)
    times, report = in_turns({name: Way({}, name) for name in names}, rounds, num_layers=1)
    report["over_thirds"] = {}
    if {"bf16", "fp8"} <= times.seconds.keys():
        for name in (name for name in PER_GEMM if name in times.seconds):
            parts = zip(*(times.runs[part] for part in name.split("-")), strict=True)
            report["over_thirds"][name] = ratio(times.runs[name], [sum(p) / 3 for p in parts])
    return report


def inspect(rounds: int) -> dict[str, Any]:
    """Compare iterations of an FP8 job in which another tool takes statistics with the others."""
    if not importlib.util.find_spec("nvdlfw_inspect"):
        return {"skipped": "no nvdlfw_inspect; pip install nvdlfw-inspect"}
    import nvdlfw_inspect.api as tool  # before the first module of Transformer Engine
    import transformer_engine

    if has_gpu():
        models.SEQUENCE = SEQUENCE
    features = Path(transformer_engine.__file__).parent / "debug" / "features"
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "inspect.yaml")
        config.write_text(INSPECT)
        tool.initialize(str(config), [str(features)], log_dir=folder, default_logging_enabled=True)
        try:
            job = Job(Way(RECIPES["tensorwise"][0]), num_layers=4)

            def iterate() -> None:
                job.iterate()
                tool.step()  # which writes the statistics of the iteration

            # Each name stands for one iteration of the same job, in this order.
            times = _alternating(iterate, tool, rounds)
        finally:
            tool.end_debug()
        logs = "".join(file.read_text() for file in Path(folder).rglob("*statistics*/*.log"))
    iterations = sorted({int(number) for number in re.findall(r"iteration=(\d+)", logs)})
    return {
        "seconds": times.seconds,
        "over_ordinary": ratio(times.runs["with statistics"], times.runs["without"]),
        "values_logged": len(logs.splitlines()),
        "iterations_logged": iterations,
        "failures": {} if iterations else {"statistics": "none were logged"},
    }


def _alternating(iterate: Callable[[], None], tool: Any, rounds: int) -> Times:
    tool.initialize_training_step(1)
    iterate()  # step 1 has none, 2 has them, and so on
    return seconds_by_turns({"with statistics": iterate, "without": iterate}, rounds, has_gpu())


MEASURES: dict[str, Callable[[int], dict[str, Any]]] = {
    "fp8": fp8,
    "gemms": gemms,
    "inspect": inspect,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write; 1 if something failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("measure", choices=tuple(MEASURES))
    parser.add_argument("--rounds", type=int, default=20, help="timed iterations of each")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    if not (has_gpu() and importlib.util.find_spec("transformer_engine")):
        report: dict[str, Any] = {"skipped": "no Transformer Engine on a GPU; launch/te.sh has it"}
    else:
        with models.alone("nccl"):
            report = MEASURES[args.measure](args.rounds)
    if args.json:
        write_result(args.json, report)
    print(report)
    return int(bool(report.get("failures")))


if __name__ == "__main__":
    raise SystemExit(main())

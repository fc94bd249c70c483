"""Transformer Engine's linears under plans, where it is installed: tests, switch, time, memory.

    python -m benchmarks.te [--json FILE]

First the cases of tests/te that need no stand-in. Then a layer of Llama-7B's width under bf16,
fp8 and bf16 again: each linear runs the recipe of its option from the next step on, the losses of
both bf16 plans are bitwise equal, and fp8 leaves no memory behind.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
os.environ["SNIP_TE_REAL"] = "1"  # before tests.te.models is imported

import torch
from rich.console import Console

from benchmarks.machine import has_gpu, write_result
from benchmarks.timing import said, seconds_by_turns

MODEL: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 4096,
    "ffn_hidden_size": 11008,
    "num_attention_heads": 32,
    "params_dtype": torch.bfloat16,
    "bf16": True,
}
SEQUENCE = 2048


def plans(rounds: int) -> dict[str, Any]:
    """Return times, memory and failures of steps under bf16, fp8 and bf16 again."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megatron_snip.linears.model import PlannedModel
    from megatron_snip.options import Option
    from megatron_snip.topology import Topology
    from tests.te import models

    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    models.SEQUENCE = SEQUENCE
    model = models.build(**MODEL).bfloat16()
    under = PlannedModel([model], Topology(), seed=0, microbatch_tokens=SEQUENCE * models.BATCH)
    under.install()
    report: dict[str, Any] = {"losses": {}, "held_bytes": {}, "peak_bytes": {}, "recipes": {}}

    def step(name: str) -> list[float]:
        under.apply(models.everything(under, Option.uniform(name)))
        model.zero_grad()
        return models.losses(model)

    for label, name in (("bf16", "bf16"), ("fp8", "fp8"), ("bf16 again", "bf16")):
        step(name)
        torch.cuda.reset_peak_memory_stats()
        report["losses"][label] = step(name)
        report["recipes"][label] = sorted({linear.recipe for linear in under.linears})
        report["peak_bytes"][label] = torch.cuda.max_memory_allocated()
        report["held_bytes"][label] = torch.cuda.memory_allocated()
    times = seconds_by_turns({n: lambda n=n: step(n) for n in ("bf16", "fp8")}, rounds, True)
    report |= {"seconds": times.seconds, "failures": times.failed}
    if report["losses"]["bf16"] != report["losses"]["bf16 again"]:
        report["failures"]["switch"] = "bf16 after fp8 is not bf16 before it"
    if report["held_bytes"]["bf16 again"] > 1.01 * report["held_bytes"]["bf16"]:
        report["failures"]["memory"] = "fp8 leaves memory behind"
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write; 1 if something failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    report: dict[str, Any] = {}
    try:
        if not has_gpu():
            raise ImportError("there is no GPU")
        import transformer_engine.pytorch
    except (ImportError, OSError) as error:
        report["skipped"] = f"no Transformer Engine (launch/te.sh brings it): {said(error)}"
    else:
        report["version"] = transformer_engine.__version__
        words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/te"]
        tests = subprocess.run([*words, "-m", "real_te"], check=False)
        try:
            report |= plans(20)
        except Exception as error:
            report["failures"] = {"plans": said(error)}
        if tests.returncode:
            report["failures"]["tests/te"] = f"exit status {tests.returncode}"
    if args.json:
        write_result(args.json, report)
    Console().print(report, markup=False)
    return int(bool(report.get("failures")))


if __name__ == "__main__":
    raise SystemExit(main())

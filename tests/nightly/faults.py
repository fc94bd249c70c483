"""Faults in every phase of a refresh on four ranks, and those that nobody can be saved from.

    python -m tests.nightly.faults [--output FILE]

1. As tests/distributed/test_faults.py, every fault with TP=2 and PP=2 together, TP=2 with two data
   ranks, and four data ranks; then a rank that comes late in every phase. Whatever becomes of it,
   all ranks come to the same.
2. A rank that fails inside Megatron's own forward-backward while pipeline peers, or those that hold
   other experts, wait for it cannot be saved; the job must end, with a line that says why, and not
   hang.
3. A rank that is killed in any phase: the others must end, and not hang.

Exit status 1 if anything is otherwise.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_snip.files import write_atomic
from megatron_snip.linears import passes
from tests.distributed.launch import RankFailure, run_ranks
from tests.distributed.workers import faults
from tests.distributed.workers.controller import MODEL
from tests.distributed.workers.fault_places import PHASES, PLACES
from tests.distributed.workers.small_model import layout

TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 pp2": {TP: 2, PP: 2, "global_batch_size": 4},
    "tp2 dp2": {TP: 2, "use_distributed_optimizer": True, "global_batch_size": 4},
    "dp4": {"use_distributed_optimizer": True, "global_batch_size": 4},
}
ALONE: dict[str, dict[str, Any]] = {
    "tp": {TP: 2},
    "pp": {PP: 2},
    "dp": {"use_distributed_optimizer": True},
}
BEYOND_HELP: dict[str, dict[str, Any]] = {
    "pp": {PP: 2},
    "ep": {"num_experts": 4, "expert_model_parallel_size": 2},
}
PATIENCE_S = 90.0
"""Well above what a job takes to start, to fail and to wait for its ranks (3 s)."""


def stranded(values: dict[str, Any]) -> None:
    """Fail on the last rank, in the middle of a measuring pass."""
    original = passes._losses

    def fail(*args: Any) -> Any:
        if dist.get_rank() == dist.get_world_size() - 1:
            raise RuntimeError("a bug in the model")
        return original(*args)

    passes._losses = fail
    with layout({**MODEL, **values}) as trainer:
        controller = trainer.controller(faults.SNIP)
        trainer.advance(2, controller)


def check_phases(name: str, values: dict[str, Any]) -> list[str]:
    """Return what is wrong with a layout."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = {"layouts": {name: values}, "folder": folder, "thorough": True}
        results = run_ranks(4, "tests.distributed.workers.faults:every_phase", arguments, 900)
    wrong = []
    for rank, result in enumerate(r[name] for r in results):
        run = result["run"]
        if not run.pop("kept") or run != result["plain"]:
            wrong.append(f"{name}, rank {rank}: training is not as if nothing had been tried")
        if result["healed"] != results[0][name]["healed"] or not result["healed"]["history"]:
            wrong.append(f"{name}, rank {rank}: the next refresh did not succeed")
        if result["saved"]["last history"] != results[0][name]["saved"]["last history"]:
            wrong.append(f"{name}, rank {rank}: a full disk has parted the ranks")
        wrong += _parted(name, rank, result["late"], results[0][name]["late"])
        if set(result["outcomes"]) < set(PLACES):
            wrong.append(f"{name}, rank {rank}: not every fault was tried")
        for label, outcome in result["outcomes"].items():
            if outcome["events"] != ["kept"] or outcome["history"]:
                wrong.append(f"{name}, rank {rank}, {label}: {outcome}")
    return wrong


def _parted(name: str, rank: int, late: dict[str, Any], leader: dict[str, Any]) -> list[str]:
    """Return in which phases a late rank has parted this one from rank 0."""
    keys = ("same", "history", "events")
    return [
        f"{name}, rank {rank}, {label}: {outcome}"
        for label, outcome in late.items()
        if any(outcome[key] != leader[label][key] for key in keys)
    ]


def check_end(function: str, arguments: dict[str, Any], wanted: str) -> list[str]:
    """Return what is wrong with the end of a job whose rank cannot be saved."""
    begin = time.monotonic()
    try:
        run_ranks(2, function, arguments, PATIENCE_S)
    except RankFailure as failure:
        seconds = time.monotonic() - begin
        if wanted not in str(failure):
            return [f"the end does not say '{wanted}':\n{failure}"]
        return [] if seconds < PATIENCE_S else [f"{seconds:.0f} s until the end"]
    return ["the job went on"]


def check_kills(values: dict[str, Any]) -> list[str]:
    """Return in which phases a rank that is killed does not end the job."""
    worker = "tests.distributed.workers.faults:killed"
    return [
        f"{phase}: {text}"
        for phase in PHASES
        for text in check_end(worker, {"values": values, "phase": phase}, "exit code -9")
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=None)
    args = parser.parse_args()
    rows: dict[str, Any] = {"faults": sorted(PLACES), "phases": sorted(PHASES)}
    for name, values in LAYOUTS.items():
        rows[f"every fault on 4 ranks, {name}"] = check_phases(name, values) or "good"
    for name, values in BEYOND_HELP.items():
        wrong = check_end("tests.nightly.faults:stranded", {"values": values}, "StrandedError")
        rows[f"a rank that is beyond help, {name}"] = wrong or "ends"
    for name, values in ALONE.items():
        rows[f"a rank killed in each phase, {name}"] = check_kills(values) or "ends"
    failed = any(
        isinstance(row, list) and name.startswith(("every", "a rank")) for name, row in rows.items()
    )
    machine = f"{platform.machine()}, gloo"
    result = {"version": 1, "machine": machine, "torch": torch.__version__, **rows}
    print(json.dumps(result, indent=1))
    if args.output is not None:
        write_atomic(args.output, json.dumps(result, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Faults in every phase of a refresh on four ranks, and ranks that are killed.

    python -m tests.nightly.faults [--output FILE]

1. As tests/distributed/test_faults.py, every fault with TP=2 and PP=2 together, TP=2 with two data
   ranks, and four data ranks. All ranks must make the same decision.
2. A rank that is killed in any phase: the job must end.

Exit status 1 if anything is otherwise.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from megatron_snip.files import write_atomic
from tests.distributed.launch import RankFailure, run_ranks
from tests.distributed.workers.fault_places import PHASES, PLACES

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


def check_phases(name: str, values: dict[str, Any]) -> list[str]:
    """Return what is wrong with a layout."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = {"layouts": {name: values}, "folder": folder}
        results = run_ranks(4, "tests.distributed.workers.faults:every_phase", arguments)
    wrong = []
    for rank, result in enumerate(r[name] for r in results):
        run = result["run"]
        if not run.pop("kept") or run != result["plain"]:
            wrong.append(f"{name}, rank {rank}: training is not as if nothing had been tried")
        if result["healed"] != results[0][name]["healed"] or not result["healed"]["history"]:
            wrong.append(f"{name}, rank {rank}: the next refresh did not succeed")
        if result["saved"]["last history"] != results[0][name]["saved"]["last history"]:
            wrong.append(f"{name}, rank {rank}: a full disk led to different decisions")
        if set(result["outcomes"]) < set(PLACES):
            wrong.append(f"{name}, rank {rank}: not every fault was tried")
        for label, outcome in result["outcomes"].items():
            if outcome["events"] != ["refresh_failed"] or outcome["history"]:
                wrong.append(f"{name}, rank {rank}, {label}: {outcome}")
    return wrong


def check_kills(values: dict[str, Any]) -> list[str]:
    """Return in which phases a rank that is killed does not end the job."""
    wrong = []
    for phase in PHASES:
        arguments = {"values": values, "phase": phase}
        try:
            run_ranks(2, "tests.distributed.workers.faults:killed", arguments)
        except RankFailure as failure:
            if "exit code -9" not in str(failure):
                wrong.append(f"{phase}: {failure}")
        else:
            wrong.append(f"{phase}: the job continued")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=None)
    args = parser.parse_args()
    rows: dict[str, Any] = {"faults": sorted(PLACES), "phases": sorted(PHASES)}
    for name, values in LAYOUTS.items():
        rows[f"every fault on 4 ranks, {name}"] = check_phases(name, values) or "good"
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

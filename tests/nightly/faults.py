"""Faults in every phase of a refresh on four ranks, and ranks that are killed.

    python -m tests.nightly.faults

1. As tests/distributed/test_faults.py, every fault with TP=2 and PP=2 together, TP=2 with two data
   ranks, and four data ranks. All ranks must make the same decision.
2. A rank that is killed in any phase: the job must end.

Exit status 1 if anything is otherwise.
"""

import copy
import itertools
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from tests.distributed import test_faults
from tests.distributed.launch import RankFailure, run_ranks
from tests.distributed.workers.fault_places import PHASES, PLACES

TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 pp2": {TP: 2, PP: 2, "global_batch_size": 4},
    "tp2 dp2": {TP: 2, "use_distributed_optimizer": True, "global_batch_size": 4},
    "dp4": {"use_distributed_optimizer": True, "global_batch_size": 4},
}
CHECKS: tuple[Callable[..., None], ...] = (
    test_faults.test_training_is_bitwise_as_if_no_refresh_had_been_tried,
    test_faults.test_the_next_refresh_succeeds,
    test_faults.test_a_full_disk_costs_files_and_nothing_else,
)
"""They compare rank 0 with another one."""


def check_phases(name: str, values: dict[str, Any]) -> list[str]:
    """Return what is wrong with a layout."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = {"layouts": {name: values}, "folder": folder}
        results = run_ranks(4, "tests.distributed.workers.faults:every_phase", arguments)
    wrong = []
    for rank, check in itertools.product(range(1, 4), CHECKS):
        try:
            check(copy.deepcopy([results[0], results[rank]]), name)
        except AssertionError as error:
            wrong.append(f"rank {rank}, {check.__name__}: {error}")
    for rank, outcomes in enumerate(result[name]["outcomes"] for result in results):
        if set(outcomes) < set(PLACES):
            wrong.append(f"rank {rank}: not every fault was tried")
        for label, outcome in outcomes.items():
            if outcome["events"] != ["refresh_failed"] or outcome["history"]:
                wrong.append(f"rank {rank}, {label}: {outcome}")
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
    wrong = {f"every fault, {name}": check_phases(name, v) for name, v in LAYOUTS.items()}
    for name, values in test_faults.LAYOUTS.items():
        wrong[f"a rank killed in each phase, {name}"] = check_kills(values)
    for case, texts in wrong.items():
        print(f"{case}: {'; '.join(texts) or 'good'}")
    return int(any(wrong.values()))


if __name__ == "__main__":
    sys.exit(main())

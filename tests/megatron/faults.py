"""A fault in every refresh of a job; `pretrain_tiny.py` installs them for TINY_FAULTS.

Faults of a measurement and of the plan's broadcast strike on the last rank. The solver and the disk
are rank 0's.
"""

import errno
import os
import signal
from pathlib import Path
from typing import Any

from megatron_snip.planning.solver_process import SolverProcess
from megatron_snip.reporting import run_directory
from megatron_snip.run.controller import SnipController
from tests.distributed.faulty_runs import BACKWARD, BROADCAST, GRADIENTS, Faults, bug

SNIP = ["--snip-start-step", "3", "--snip-interval", "2", "--snip-lag", "1"]
"""Refreshes at odd iterations; their plans are due before the even ones."""

FULL_DISK = "full disk"
LATE = "late solver"
DEAD = "dead solver"
BY_ITERATION = {3: FULL_DISK, 5: "gradients", 7: "measurement", 9: "broadcast", 11: LATE, 13: DEAD}
"""Iteration of a refresh -> its fault. All but the first keep the plan of the first."""

REASONS = {
    "gradients": "measuring failed on rank 1: RuntimeError: a bug",
    "measurement": "measuring failed on rank 1: ",
    "broadcast": "applying the plan failed on rank 1: RuntimeError: a bug",
    LATE: "the solver process did not answer within 0.2 s",
    DEAD: "the solver process ended without an answer",
}
"""Fault -> why all ranks keep the plan, in the log of rank 0."""
OF_A_MEASUREMENT = ("gradients", "measurement")
NUM_ITERATIONS = 14

_faults = Faults(
    {"gradients": (GRADIENTS, bug), "measurement": (BACKWARD, bug), "broadcast": (BROADCAST, bug)}
)
_installed = _faults.installed()


def install() -> None:
    """Let every refresh of this process fail."""
    _installed.__enter__()
    forward_backward = SnipController.forward_backward
    submit = SolverProcess.submit
    result = SolverProcess.result
    write_atomic = run_directory.write_atomic

    def faulty_iteration(self: Any, iteration: int, *args: Any, **kwargs: Any) -> Any:
        if iteration in BY_ITERATION:
            _faults.at(BY_ITERATION[iteration])
        return forward_backward(self, iteration, *args, **kwargs)

    def write_until_full(path: Path, text: str) -> None:
        # By the file and not by the time: a thread writes it, perhaps after the iteration.
        if BY_ITERATION.get(int(path.stem) if path.stem.isdigit() else 0) == FULL_DISK:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_atomic(path, text)

    def faulty_submit(self: Any, *args: Any, **kwargs: Any) -> None:
        child = self._running_child() if _faults.now in (LATE, DEAD) else None
        if child is not None:
            os.kill(child.pid, signal.SIGSTOP)
        submit(self, *args, **kwargs)
        if _faults.now == DEAD:
            child.kill()

    def faulty_result(self: Any, timeout_s: float) -> Any:
        return result(self, 0.2 if _faults.now == LATE else timeout_s)

    setattr(SnipController, "forward_backward", faulty_iteration)  # noqa: B010
    setattr(run_directory, "write_atomic", write_until_full)  # noqa: B010
    setattr(SolverProcess, "submit", faulty_submit)  # noqa: B010
    setattr(SolverProcess, "result", faulty_result)  # noqa: B010

"""Run a Python function on N gloo ranks of this machine and bring back what each rank returned.

    results = run_ranks(2, "tests.distributed.workers.MODULE:FUNCTION", {"value": 3})

One fresh interpreter imports the function's module once and forks the ranks, so that the import of
torch and Megatron is paid once and not N times. Rank 0 serves the rendezvous on a listening socket
that was opened before the fork: no port is guessed. Everything a rank prints goes to its own log,
which is shown when a rank fails or when the time is up (then with every rank's stack).
"""

import contextlib
import faulthandler
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.processes import ROOT

TIMEOUT_S = 1500.0
"""Limit of every job and command that tests start: it ends what hangs, on the slowest machine."""
KILL_AFTER_S = 5.0
"""Seconds that the other ranks may run after one has failed."""
LOG_TAIL = 40000
"""Characters of a rank's log that a failure shows."""
ERROR_HEAD = 1500
"""Characters of an exception's message that its rank's log keeps."""

RANK_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "MASTER_ADDR": "127.0.0.1",
}


class RankFailure(AssertionError):
    """A rank raised, died, or was still running when the time was up; the text holds its log."""


def run_ranks(
    world_size: int,
    function: str,
    arguments: Mapping[str, Any] | None = None,
    timeout_s: float = TIMEOUT_S,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call `function(**arguments)` on every rank of a gloo process group.

    Args:
        world_size: number of ranks, all on 127.0.0.1.
        function: `package.module:name`; the module is imported before the ranks are forked, so it
            must not start threads at import. Inside, `torch.distributed` is initialized, and
            RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set.
        arguments: JSON values, passed as keywords.
        timeout_s: seconds after the start of the ranks until all are ended.
        environment: variables on top of this process' own and of `RANK_ENVIRONMENT`.

    Returns:
        What each rank returned, by rank, after a trip through JSON.

    Raises:
        RankFailure: if any rank fails or the time is up.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        job = {
            "world_size": world_size,
            "function": function,
            "arguments": dict(arguments or {}),
            "timeout_s": timeout_s,
            "folder": folder,
        }
        environ = {**os.environ, **RANK_ENVIRONMENT, **(environment or {})}
        environ["PYTHONPATH"] = os.pathsep.join(
            [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        parent = subprocess.Popen(
            [sys.executable, "-m", "tests.distributed.launch", json.dumps(job)],
            cwd=ROOT,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a process group of its own: ending it ends the ranks only
        )
        try:
            output, _ = parent.communicate(timeout=timeout_s + TIMEOUT_S)
        except subprocess.TimeoutExpired:
            output = b"the ranks did not end in time"
        finally:
            _end_group(parent)
        if parent.returncode != 0:
            raise RankFailure(_report(Path(folder), job, output.decode(errors="replace")))
        return [
            json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(world_size)
        ]


def free_port() -> int:
    """Return a TCP port that was free a moment ago (for commands that want one in advance)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _end_group(parent: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the process group that `parent` leads."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(parent.pid, signal.SIGKILL)
    parent.wait()


def _report(folder: Path, job: Mapping[str, Any], output: str) -> str:
    lines = [f"{job['function']} on {job['world_size']} ranks: {output.strip()}"]
    for rank in range(job["world_size"]):
        log = folder / f"{rank}.log"
        text = log.read_text(errors="replace").strip() if log.exists() else "(not started)"
        lines.append(f"---- rank {rank} ----\n{text[-LOG_TAIL:]}")
    return "\n".join(lines)


# ---- below: what runs in the fresh interpreter ------------------------------------------------


def _serve(job: Mapping[str, Any]) -> int:
    """Import the module, fork the ranks, wait; return 0 if every rank wrote its result."""
    module, _, name = job["function"].partition(":")
    function = getattr(importlib.import_module(module), name)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    children: dict[int, int] = {}
    for rank in range(job["world_size"]):
        pid = os.fork()
        if pid == 0:
            _be_rank(rank, job, function, listener)
        children[pid] = rank
    listener.close()
    statuses = wait(children, job["timeout_s"])
    for rank, status in statuses.items():
        if status != 0:
            end = "was still running" if status is None else f"ended with exit code {status}"
            print(f"rank {rank} {end};", flush=True)
    return int(any(status != 0 for status in statuses.values()))


def wait(children: dict[int, int], timeout_s: float) -> dict[int, int | None]:
    """Wait for {process: rank}; after the first failure end the others soon.

    Returns:
        {rank: exit status}, in the order of their ends; None for one that had to be killed.
    """
    statuses: dict[int, int | None] = {}
    deadline = time.monotonic() + timeout_s + KILL_AFTER_S
    while children and time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            time.sleep(0.01)
        elif (rank := children.pop(pid, None)) is not None:
            statuses[rank] = os.waitstatus_to_exitcode(status)
            if status != 0:
                deadline = min(deadline, time.monotonic() + KILL_AFTER_S)
    for pid, rank in children.items():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        statuses[rank] = None
    return statuses


def _be_rank(rank: int, job: Mapping[str, Any], function: Any, listener: socket.socket) -> None:
    """Run the function as one rank and leave the process; never returns."""
    folder = Path(job["folder"])
    log_to(folder / f"{rank}.log", job["timeout_s"])
    status = 1
    try:
        _join(rank, job["world_size"], listener)
        result = json.dumps(function(**job["arguments"]))
        (folder / f"{rank}.json").write_text(result)
        status = 0
    except BaseException as error:
        # Not print_exc: some of torch's messages are longer than all that a failure shows.
        traceback.print_tb(error.__traceback__)
        print(f"{type(error).__name__}: {str(error)[:ERROR_HEAD]}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # no atexit handlers: they belong to the parent


def log_to(file: Path, timeout_s: float) -> None:
    """Let this process print into a file; when the time is up, its stacks too, and end it."""
    log = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()
    faulthandler.dump_traceback_later(timeout_s, exit=True)


def _join(rank: int, world_size: int, listener: socket.socket) -> None:
    """Join the gloo process group through the socket that was opened before the fork."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    torch.set_num_threads(1)
    port = listener.getsockname()[1]
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_PORT=str(port)
    )
    if rank == 0:
        options = {"wait_for_workers": False, "master_listen_fd": listener.detach()}
        store = TCPStore("127.0.0.1", port, world_size, is_master=True, **options)
    else:
        listener.close()
        store = TCPStore("127.0.0.1", port, world_size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


if __name__ == "__main__":
    sys.exit(_serve(json.loads(sys.argv[1])))

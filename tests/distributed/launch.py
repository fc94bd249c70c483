"""Run a Python function on N ranks of this machine and bring back what each rank returned.

    results = run_ranks(2, "tests.distributed.MODULE:FUNCTION", {"value": 3})

One interpreter for all such calls imports torch and Megatron, and forks the ranks of each: the
import takes longer than most functions. Rank 0 serves the rendezvous on a listening socket that was
opened before the fork: no port is guessed. Everything a rank prints goes to its own log, which is
shown when a rank fails or when the time is up (then with every rank's stack).
"""

import contextlib
import faulthandler
import functools
import importlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

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


@dataclass(frozen=True)
class Run:
    """How each rank of a job ended."""

    statuses: tuple[int, ...]  # -9 for one that was killed
    logs: tuple[str, ...]
    results: tuple[Any, ...]  # None for a rank that wrote none
    output: Path = Path()  # SNIP's run directory, if it has one

    @property
    def report(self) -> str:
        ends = zip(self.statuses, self.logs, strict=True)
        return "\n".join(
            f"---- rank {rank} ended with exit code {status} ----\n{log.strip()[-LOG_TAIL:]}"
            for rank, (status, log) in enumerate(ends)
        )

    def finished(self) -> list[Any]:
        """Every rank's result, after a trip through JSON; fails if a rank did not end well."""
        assert all(status == 0 for status in self.statuses), self.report
        return list(self.results)


class Server:
    """An interpreter that imports once what takes long, and forks the ranks of each job."""

    def __init__(self, *folders: Path, preload: Sequence[str] = ()) -> None:
        """Start it; ranks import from `folders` before all others. `preload` are modules."""
        path = [*map(str, folders), str(ROOT), os.environ.get("PYTHONPATH")]
        environment = {**os.environ, **RANK_ENVIRONMENT, "PYTHONWARNINGS": "ignore"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.distributed.launch", *preload],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=ROOT,
            start_new_session=True,  # a process group of its own: ending it ends the ranks only
        )

    def run(
        self,
        ranks: int,
        function: str,
        arguments: Mapping[str, Any],
        timeout_s: float = TIMEOUT_S,
        join: bool = False,
    ) -> Run:
        """Call `function(**arguments)` on ranks; if `join`, they are a gloo process group.

        After `timeout_s` the ranks are ended, with their stacks in the logs.
        """
        with tempfile.TemporaryDirectory(prefix="ranks-") as name:
            folder = Path(name)
            job = {"ranks": ranks, "function": function, "arguments": arguments, "join": join}
            job |= {"timeout_s": timeout_s, "folder": name}
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            reply = self._process.stdout.readline()
            assert reply, f"the server has ended: {function}"
            logs = [(folder / f"{i}.log").read_text(errors="replace") for i in range(ranks)]
            files = [folder / f"{i}.json" for i in range(ranks)]
            results = [json.loads(f.read_text()) if f.exists() else None for f in files]
            return Run(tuple(json.loads(reply)), tuple(logs), tuple(results))

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@functools.cache
def shared_server() -> Server:
    """Start the server of this process, which has Megatron and the solver loaded.

    It ends with this process: at the end of its input.
    """
    return Server(preload=["tests.distributed.small_model", "ortools.sat.python.cp_model"])


def run_ranks(
    world_size: int,
    function: str,
    arguments: Mapping[str, Any] | None = None,
    server: Server | None = None,
) -> list[Any]:
    """Call `function(**arguments)` on every rank of a gloo process group.

    Args:
        world_size: number of ranks, all on 127.0.0.1.
        function: `package.module:name`; the module is imported before the ranks are forked, so it
            must not start threads at import. Inside, `torch.distributed` is initialized, and
            RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set.
        arguments: JSON values, passed as keywords.
        server: by default `shared_server()`; a function whose module must be imported before
            Megatron wants another.

    Returns:
        What each rank returned, by rank, after a trip through JSON.

    Raises:
        AssertionError: if a rank raised, died, or was still running after `TIMEOUT_S`; it holds
            the logs.
    """
    chosen = shared_server() if server is None else server
    return chosen.run(world_size, function, arguments or {}, join=True).finished()


def free_port() -> int:
    """Return a TCP port that was free a moment ago (for commands that want one in advance)."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


# ---- below: the server, and the ranks that it forks --------------------------------------------


def serve(preload: Sequence[str]) -> None:
    """Answer every request with the ranks' exit statuses, one line of JSON each way."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing that is printed here, or by an import, may look like a reply
    for module in preload:
        importlib.import_module(module)
    for line in sys.stdin:
        job = json.loads(line)
        module, _, name = job["function"].partition(":")
        function = getattr(importlib.import_module(module), name)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            children: dict[int, int] = {}
            for rank in range(job["ranks"]):
                pid = os.fork()
                if pid == 0:
                    _be_rank(rank, job, function, listener)
                children[pid] = rank
        print(json.dumps(_wait(children, job["timeout_s"])), file=replies, flush=True)


def _wait(children: dict[int, int], timeout_s: float) -> list[int]:
    """Wait for {process: rank}; return exit statuses. After the first failure, end the others."""
    statuses = [-int(signal.SIGKILL)] * len(children)
    deadline = time.monotonic() + timeout_s + KILL_AFTER_S
    while children and time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            time.sleep(0.01)
        elif (rank := children.pop(pid, None)) is not None:
            statuses[rank] = os.waitstatus_to_exitcode(status)
            if status != 0:
                deadline = min(deadline, time.monotonic() + KILL_AFTER_S)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return statuses


def _be_rank(
    rank: int, job: Mapping[str, Any], function: Callable[..., Any], listener: socket.socket
) -> NoReturn:
    """Be one rank; when the time is up, print every thread's stack and end."""
    folder = Path(job["folder"])
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()
    faulthandler.dump_traceback_later(job["timeout_s"], exit=True)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job["ranks"]))
    os.environ["TINY_RESULTS"] = job["folder"]  # where a script writes what its rank returns
    status = 1
    try:
        if job["join"]:
            _join(rank, job["ranks"], listener)
        result = function(**job["arguments"])
        (folder / f"{rank}.json").write_text(json.dumps(result))
        status = 0
    except SystemExit as end:
        status = int(end.code or 0) if isinstance(end.code, int | None) else 1
    except BaseException as error:
        # Not print_exc: some of torch's messages are longer than all that a failure shows.
        traceback.print_tb(error.__traceback__)
        print(f"{type(error).__name__}: {str(error)[:ERROR_HEAD]}", file=sys.stderr)
    finally:
        # Of Megatron's checkpoint writer. It runs with SIGTERM blocked (`trainer/checkpoint.py`).
        for process in multiprocessing.active_children():
            process.kill()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # no atexit handlers: they belong to the parent


def _join(rank: int, world_size: int, listener: socket.socket) -> None:
    """Join the gloo process group through the socket that was opened before the fork."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    torch.set_num_threads(1)
    port = listener.getsockname()[1]
    os.environ["MASTER_PORT"] = str(port)
    if rank == 0:
        options = {"wait_for_workers": False, "master_listen_fd": listener.detach()}
        store = TCPStore("127.0.0.1", port, world_size, is_master=True, **options)
    else:
        listener.close()
        store = TCPStore("127.0.0.1", port, world_size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


if __name__ == "__main__":
    serve(sys.argv[1:])

"""Runs `python -m megatron_snip` on N ranks, again and again, without importing Megatron each time.

A fresh interpreter imports torch and Megatron once and serves requests on its standard input: for
each it forks the ranks of a job, and every rank does what `python -m megatron_snip ARGS` does, in a
process of its own. Ranks find each other as torchrun's do, by environment variables.
"""

import atexit
import contextlib
import importlib.util
import json
import os
import runpy
import signal
import subprocess
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_snip.__main__ import main
from megatron_snip.patches import cpu
from tests.distributed.launch import RANK_ENVIRONMENT, ROOT, free_port, log_to, wait

LOG_TAIL = 6000
"""Characters of a rank's log that a failure shows."""


@dataclass(frozen=True)
class Run:
    """How each rank of a job ended."""

    statuses: tuple[int, ...]  # -9 for one that was killed
    logs: tuple[str, ...]
    results: tuple[dict[str, Any] | None, ...]  # None for a rank that wrote none

    @property
    def report(self) -> str:
        ends = zip(self.statuses, self.logs, strict=True)
        return "\n".join(
            f"---- rank {rank}: status {status} ----\n{log[-LOG_TAIL:]}"
            for rank, (status, log) in enumerate(ends)
        )

    def finished(self) -> list[dict[str, Any]]:
        """Every rank's results; fails if a rank did not end well."""
        assert all(status == 0 for status in self.statuses), self.report
        assert all(result is not None for result in self.results), self.report
        return [result for result in self.results if result is not None]


class Fleet:
    """The server, from this side of the pipe."""

    def __init__(self, *first: Path) -> None:
        """Start it; `first` are folders that its ranks import from before all others."""
        environment = {**os.environ, **RANK_ENVIRONMENT, "PYTHONWARNINGS": "ignore"}
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [*map(str, first), str(ROOT), os.environ.get("PYTHONPATH")])
        )
        # Megatron-LM compiles a helper, and torch has the header files that it needs.
        torch = Path(importlib.util.find_spec("torch").origin).with_name("include")
        environment["CPATH"] = f"{sysconfig.get_path('include')}:{torch}"
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.megatron.fleet"],
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
        words: Sequence[str],
        environment: Mapping[str, str] | None = None,
        plain: bool = False,
        timeout_s: float = 200.0,
    ) -> Run:
        """Run `python -m megatron_snip WORDS` on ranks, or `python WORDS` with the CPU patch alone.

        After `timeout_s` the ranks are ended, with their stacks in the logs.
        """
        with tempfile.TemporaryDirectory(prefix="fleet-") as folder:
            job = {
                "ranks": ranks,
                "words": list(words),
                "environment": dict(environment or {}),
                "plain": plain,
                "timeout_s": timeout_s,
                "folder": folder,
                "port": free_port(),
            }
            assert self._server.stdin is not None and self._server.stdout is not None
            self._server.stdin.write(json.dumps(job) + "\n")
            self._server.stdin.flush()
            reply = self._server.stdout.readline()
            assert reply, "the fleet's server has ended"
            logs = [
                (Path(folder) / f"{rank}.log").read_text(errors="replace") for rank in range(ranks)
            ]
            files = [Path(folder) / f"{rank}.json" for rank in range(ranks)]
            results = [json.loads(f.read_text()) if f.exists() else None for f in files]
            return Run(tuple(json.loads(reply)), tuple(logs), tuple(results))

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._server.pid, signal.SIGKILL)
        self._server.wait()


# ---- below: the server, and the ranks that it forks --------------------------------------------


def serve() -> None:
    """Answer every request with the ranks' exit statuses, one line of JSON each way."""
    import megatron.training.training  # noqa: F401  what takes long to import

    import megatron_snip.controller  # noqa: F401

    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing that is printed here may look like a reply
    for line in sys.stdin:
        job = json.loads(line)
        children: dict[int, int] = {}
        for rank in range(job["ranks"]):
            pid = os.fork()
            if pid == 0:
                _be_rank(rank, job)
            children[pid] = rank
        found = wait(children, job["timeout_s"])
        statuses = [-signal.SIGKILL if (s := found[r]) is None else s for r in sorted(found)]
        print(json.dumps(statuses), file=replies, flush=True)


def _be_rank(rank: int, job: Mapping[str, Any]) -> None:
    """Be one rank; never returns."""
    log_to(Path(job["folder"]) / f"{rank}.log", job["timeout_s"])
    os.environ.update(
        job["environment"],
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(job["ranks"]),
        LOCAL_WORLD_SIZE=str(job["ranks"]),
        MASTER_PORT=str(job["port"]),
        TINY_RESULTS=job["folder"],
        TINY_EARLY="1",
    )
    if "wandb" in sys.modules:  # a rank that ended has removed what all inherit
        from wandb.sdk.data_types._private import MEDIA_TMP

        Path(MEDIA_TMP.name).mkdir(exist_ok=True)
    status = 1
    try:
        status = _run_plainly(job["words"]) if job["plain"] else main(job["words"])
    except SystemExit as end:
        status = int(end.code or 0) if isinstance(end.code, int | None) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run_plainly(words: list[str]) -> int:
    cpu.install(claim_cuda=True)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    serve()

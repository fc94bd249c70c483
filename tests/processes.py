"""Python in a process of its own."""

import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run_python(
    *words: object,
    cwd: Path | None = None,
    stdin: str | None = None,
    timeout: float = 600,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS`, which finds this repository; variables go on top of this process' own."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", **environment}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(
        command, cwd=cwd, env=environ, input=stdin, capture_output=True, text=True, timeout=timeout
    )


def run_copy(function: Callable[[], None]) -> int:
    """Run a function in a copy of this process; return the copy's exit status.

    It has imported what this process has: torch alone takes seconds.
    """
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            function()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

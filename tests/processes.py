"""Python in a process of its own."""

import os
import subprocess
import sys
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

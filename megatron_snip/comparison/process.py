"""TrainingProcess: one run in a process of its own, `megatron-snip train` as an only rank.

The process is told that it is rank 0 of 1, so that it trains itself and starts no others; port 0
lets its rendezvous take any free port.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

ENDING_S = 20.0
"""Seconds that a run may take to end when it is asked to; then it is killed."""


class TrainingProcess:
    """A run that has been started.

    Attributes:
        started: `time.monotonic()` of the start.
    """

    def __init__(self, config_file: Path, log: Path, threads: int, kept_open: int) -> None:
        """Start it.

        Args:
            config_file: its settings.
            log: receives what it prints; replaced.
            threads: of its CPU work.
            kept_open: a file descriptor that it inherits and keeps open while it lives.
        """
        command = [sys.executable, "-m", "megatron_snip", "train", "--config", str(config_file)]
        with log.open("wb") as stream:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=rank_environment(os.environ, threads),
                pass_fds=(kept_open,),
            )
        self.started = time.monotonic()

    def poll(self) -> int | None:
        """Return its exit status, or None while it lives."""
        return self._process.poll()

    def end(self) -> None:
        """Ask it to end, and wait until it has."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            self._process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def rank_environment(inherited: os._Environ[str] | dict[str, str], threads: int) -> dict[str, str]:
    """Return the environment of a launcher's only rank.

    Args:
        inherited: this process's.
        threads: of the rank's CPU work.
    """
    count = str(threads)
    return {
        **inherited,
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
    }

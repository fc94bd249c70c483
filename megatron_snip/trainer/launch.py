"""The front process: start the ranks with torch's launcher, and end as they end.

A user types one command. Outside of torchrun it starts `nproc_per_node` ranks on this machine, each
`python -m megatron_snip.trainer.worker CONFIG.json`, waits, and turns what went wrong into what a
user can read: bad input is one line and exit code 2; a crash is the traceback of the rank that
failed first and exit code 1; a signal ends all ranks and gives 128 + its number, or, where they
have saved a checkpoint before they left, 75 (EX_TEMPFAIL: run it again to go on).
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

from megatron_snip.errors import SnipError, UsageError
from megatron_snip.trainer.config import TrainConfig
from megatron_snip.trainer.failure import Failure, read_failure

LOOPBACK = "127.0.0.1"
SAVED_AND_STOPPED = 75
"""Exit status of a run that a signal has ended after a checkpoint."""
_STOPPED = "stopped"


def under_torchrun() -> bool:
    """Whether this process is a rank that a launcher has started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def set_environment(local_ranks: int) -> None:
    """Set what must be known before torch is imported; what the user has set stays.

    Args:
        local_ranks: ranks on this machine; they share its cores.
    """
    threads = max(1, (os.cpu_count() or 1) // local_ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    # Megatron orders its communication kernels by launch order, which needs one queue.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def launch(config: TrainConfig, nproc_per_node: int) -> int:
    """Run a training on ranks of this machine; return the exit status.

    Raises:
        UsageError: if a rank refused its input.
        SnipError: if a rank failed for a reason that one line tells.
    """
    set_environment(nproc_per_node)
    with tempfile.TemporaryDirectory(prefix="megatron-snip-") as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(config.model_dump(mode="json")))
        status = _run(file, nproc_per_node, _patience(config))
        return SAVED_AND_STOPPED if status == 0 and _has_stopped(file.parent) else status


def write_stopped(folder: Path, reason: str) -> None:
    """A rank, to the front process: the run has ended on a signal, with a checkpoint.

    Args:
        folder: of the settings that the front process has named.
        reason: the signal's name.
    """
    (folder / _STOPPED).write_text(reason)


def _has_stopped(folder: Path) -> bool:
    return (folder / _STOPPED).exists()


def _patience(config: TrainConfig) -> dict[str, Any]:
    """Return the launcher's settings that give ranks time to save, where it has such settings."""
    from torch.distributed.launcher.api import LaunchConfig

    if config.save is None:
        return {}
    wanted = {
        "signals_to_handle": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        "shutdown_timeout": 60 * config.distributed_timeout_minutes,
    }
    known = {field.name for field in dataclasses.fields(LaunchConfig)}  # newer than torch 2.6
    return {name: value for name, value in wanted.items() if name in known}


def _run(file: Path, nproc_per_node: int, patience: dict[str, Any]) -> int:
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _quiet_launcher()
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc_per_node,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{LOOPBACK}:0",
        local_addr=LOOPBACK,  # a machine's own name need not resolve
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(file.parent)),
        **patience,
    )
    command = ("-u", "-m", "megatron_snip.trainer.worker", str(file))
    try:
        elastic_launch(settings, sys.executable)(*command)
    except ChildFailedError as error:
        return _explain(error)
    except SignalException as error:
        if _has_stopped(file.parent):
            return SAVED_AND_STOPPED
        print(f"megatron-snip: ended by {error.sigval.name}", file=sys.stderr)
        return 128 + int(error.sigval)
    return 0


def _quiet_launcher() -> None:
    """Silence the launcher's own reports, which are for clusters; ours are below."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _explain(error: Any) -> int:
    """Report the first failure among a ChildFailedError's.

    Raises:
        UsageError: if that rank refused its input.
        SnipError: if its reason is one line.
    """
    failures = [
        read_failure(failure.error_file)
        or Failure("crash", f"rank {rank} ended by {_ending(failure)}", float("inf"))
        for rank, failure in error.failures.items()
    ]
    # A rank that hears nothing from a failed one fails too; the first knows the reason.
    first = min(failures, key=lambda failure: failure.time)
    if first.kind == "usage":
        raise UsageError(first.text)
    if first.kind == "error":
        raise SnipError(first.text)
    print(first.text.rstrip(), file=sys.stderr)
    print("megatron-snip: training crashed; see above", file=sys.stderr)
    return 1


def _ending(failure: Any) -> str:
    return failure.signal_name() if failure.exitcode < 0 else f"exit code {failure.exitcode}"

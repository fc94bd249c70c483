"""Starts the ranks of one machine with torch's elastic agent, and reports how they end.

`megatron-snip train` starts N processes `python -m megatron_snip.trainer.launch CONFIG.json` and
waits. Bad input ends in one line and exit code 2. Any other failure ends with the reason of the
rank that failed first and exit code 1. A signal ends all ranks with 128 + its number, or with
75 (EX_TEMPFAIL: run the command again) if they saved a checkpoint.

Under torchrun or srun (RANK and WORLD_SIZE are set) the process is a rank itself. This module
imports torch only when it launches.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import json
import logging
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from megatron_snip.errors import SnipError, UsageError

if TYPE_CHECKING:
    from megatron_snip.trainer.config import TrainConfig
    from megatron_snip.trainer.loop import TrainingResult

LOOPBACK = "127.0.0.1"
SAVED_AND_STOPPED = 75
"""Exit status of a run that a signal ended after a checkpoint."""

ANSWER_S = 10.0
"""Seconds in which every rank must react to a signal before all ranks are killed."""

EXIT_S = 20
"""Seconds in which ranks that do not save must end after a signal."""

SAVE_S = 600
"""Seconds in which ranks that save must end after a signal."""

_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
_SET_PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of Linux's prctl."""


def under_torchrun() -> bool:
    """Whether a launcher started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def default_num_ranks(config: TrainConfig) -> int:
    """Return the ranks of one model replica, or of as many replicas as fit on the GPUs."""
    import torch

    replica = config.model_parallel_size
    return max(replica, torch.cuda.device_count() // replica * replica)


def launch(config: TrainConfig, num_ranks: int) -> int:
    """Run a training on `num_ranks` ranks of this machine; return the exit status.

    Raises:
        UsageError: if a rank refused its input.
        SnipError: if a rank failed for a reason that is one line.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException

    _set_environment(num_ranks)
    with tempfile.TemporaryDirectory(prefix="megatron-snip-") as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(config.model_dump(mode="json")))
        with _signal_watch(folder):
            try:
                failures = _run_agent(config, num_ranks, folder)
            except SignalException as error:
                if not (folder / "stopped").exists():
                    text = f"ended by {signal.Signals(error.sigval).name}"
                    late = _unanswered(folder)
                    if late and (folder / "killed").exists():  # others ended before they answered
                        text += f"; no answer from rank {', '.join(map(str, sorted(late)))}"
                    print(f"megatron-snip: {text}", file=sys.stderr)
                    return 128 + int(error.sigval)
                failures = {}
            finally:
                _kill(folder)  # child processes of ranks, such as Megatron's checkpoint writers
        if failures:
            return _explain(folder, failures)
        return SAVED_AND_STOPPED if (folder / "stopped").exists() else 0


def _run_agent(config: TrainConfig, num_ranks: int, folder: Path) -> dict[int, Any]:
    """Run torch's elastic agent; return {rank: torch's ProcessFailure}."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # `_explain` reports failures
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = _SIGNALS
    listener = socket.create_server((LOOPBACK, 0))  # torch itself would listen on all interfaces
    port = listener.getsockname()[1]
    rendezvous = StaticTCPRendezvous(LOOPBACK, port, 0, 1, folder.name, timeout=900)
    rendezvous._store = TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    spec = WorkerSpec(
        role="trainer",
        local_world_size=num_ranks,
        rdzv_handler=rendezvous,
        entrypoint=sys.executable,
        args=("-u", "-m", "megatron_snip.trainer.launch", str(folder / "config.json")),
        max_restarts=0,
        monitor_interval=0.1,
        local_addr=LOOPBACK,  # the name of a machine need not resolve
    )
    options: dict[str, Any] = {"logs_specs": DefaultLogsSpecs(log_dir=str(folder))}
    if "shutdown_timeout" in inspect.signature(LocalElasticAgent).parameters:  # newer than 2.6
        options["shutdown_timeout"] = EXIT_S if config.save is None else SAVE_S
    result = LocalElasticAgent(spec, start_method="spawn", **options).run()
    return dict(result.failures) if result.is_failed() else {}


@contextmanager
def _signal_watch(folder: Path) -> Iterator[None]:
    """Kill all ranks after a second signal, or if one does not answer the first in `ANSWER_S`.

    A thread does it, because the agent waits in the main thread.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def watch() -> None:
        if not reader.recv(1):
            return
        second, _, _ = select.select([reader], [], [], ANSWER_S)
        if (not second and _unanswered(folder)) or reader.recv(1):
            (folder / "killed").touch()
            _kill(folder)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        writer.close()
        thread.join()
        reader.close()


def _ranks(folder: Path) -> dict[int, int]:
    """Return {rank: process id} of the ranks that have started."""
    return {int(file.name[5:]): int(file.read_text() or 0) for file in folder.glob("rank-*")}


def _unanswered(folder: Path) -> set[int]:
    return {rank for rank in _ranks(folder) if not (folder / f"answered-{rank}").exists()}


def _kill(folder: Path) -> None:
    """Kill the process groups of all ranks; torch makes each rank the leader of one."""
    for process in _ranks(folder).values():
        if process:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process, signal.SIGKILL)


def _explain(folder: Path, failures: dict[int, Any]) -> int:
    """Report the first failure; others are mostly its consequence.

    Raises:
        UsageError: if that rank refused its input.
        SnipError: if its reason is one line.
    """
    reasons = []
    for rank, failure in failures.items():
        code = failure.exitcode
        ending = failure.signal_name() if code < 0 else f"exit code {code}"
        reason = float("inf"), "error", f"rank {rank} ended by {ending}"
        with contextlib.suppress(OSError, ValueError):  # it did not come to write the file
            reason = tuple(json.loads((folder / f"failure-{rank}").read_text()))
        reasons.append(reason)
    _, kind, text = min(reasons)
    if kind == "usage":
        raise UsageError(text)
    if kind == "error":
        raise SnipError(text)
    print(text.rstrip(), file=sys.stderr)
    print("megatron-snip: training crashed; see above", file=sys.stderr)
    return 1


def _set_environment(local_ranks: int) -> None:
    """Set what torch reads at import; the user's values win. Local ranks share the cores."""
    threads = max(1, (os.cpu_count() or 1) // local_ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    # Megatron orders its communication kernels by launch order, which needs one queue.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def train_as_rank(config: TrainConfig) -> TrainingResult:
    """Every rank of a launcher: prepare the process and train; see `session.run_rank`.

    Raises:
        UsageError: if the input is bad; every rank raises.
        SnipError: if a rank cannot continue.
    """
    _set_environment(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    # Megatron and torch warn of missing Transformer Engine and of their own deprecated calls.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    for message in (
        r".torch\.distributed\..* is deprecated",
        "Please use DTensor instead",
        r"The \.grad attribute of a Tensor that is not a leaf",
    ):
        warnings.filterwarnings("ignore", message=message)
    from megatron_snip.trainer.session import run_rank

    return run_rank(config)


def _main(file: Path) -> int:
    """Be a rank that `launch` started; write the reason if the run fails."""
    folder, rank = file.parent, os.environ["RANK"]
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    _answer_signals(folder, rank)
    (folder / f"rank-{rank}").write_text(str(os.getpid()))
    if sys.platform == "linux":  # end if the launcher is killed
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGTERM))
    from megatron_snip.trainer.config import make_train_config

    kind, text, status = "", "", 0
    try:
        result = train_as_rank(make_train_config(json.loads(file.read_text())))
        if result.stopped is not None:  # by a signal
            (folder / "stopped").touch()
    except UsageError as error:
        kind, text, status = "usage", str(error), 2
    except SnipError as error:
        kind, text, status = "error", str(error), 1
    except Exception:
        kind, text, status = "crash", traceback.format_exc(), 1
    if status:
        (folder / f"failure-{rank}").write_text(json.dumps([time.time(), kind, text]))
    return status


def _answer_signals(folder: Path, rank: str) -> None:
    """Answer signals in a thread: the main thread may wait in a collective for a stopped rank."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def answer(reader: socket.socket, writer: socket.socket) -> None:
        while reader.recv(1):
            if any(folder.glob("failure-*")):  # the main thread may wait for a failed rank
                os._exit(1)
            with contextlib.suppress(OSError):
                (folder / f"answered-{rank}").touch()

    threading.Thread(target=answer, args=(reader, writer), daemon=True).start()


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)  # runs `finally` blocks, which close files


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1])))

"""Starts the ranks of one machine, and reports how they end.

`megatron-snip train` starts N processes `python -P -m megatron_snip.trainer.launch SETTINGS REPORT
PID` (its own) and waits. `-P` keeps the current directory out of the ranks' imports. SETTINGS and
REPORT are descriptors of files without a name, so that a launcher that is killed leaves nothing:
the settings as JSON, and lines in which the rank answers a signal and writes its error.

Bad input ends in one line and exit code 2. Any other failure ends with exit code 1 and names a
killed rank, else the earliest error that a rank wrote. After a signal the exit code is 75
(EX_TEMPFAIL: run the command again) if the ranks saved a checkpoint, else 128 + its number.

If RANK and WORLD_SIZE are set, as torchrun sets them, the process is a rank itself. Such a rank
ends with 0 after a signal and a checkpoint: at any other status torchrun ends the other ranks and
fails with 1, and `launch/slurm.sbatch` queues the job again only after 0.

Importing this module does not import torch. Without a GPU the launcher imports it after it has
started the ranks, while they do the same; for the store where they meet, which must outlive each of
them.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterable, Sequence
from io import FileIO
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from megatron_snip.errors import SnipError, UnsupportedError, UsageError, known_failure
from megatron_snip.output import outlive_output

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

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

GRACE_S = 2.0
"""Seconds in which the other ranks may close their files after one has failed."""

POLL_S = 0.1

MAX_WORLD_SIZE = 1_000_000
MAX_LOCAL_RANKS = 1024
"""Most ranks that are started on one machine."""

_NOT_A_RANK = (
    "torchrun sets it for a rank; to start the ranks here: env -u RANK -u WORLD_SIZE megatron-snip "
    "train ..."
)

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
_PR_SET_PDEATHSIG = 1  # of Linux's prctl


def is_rank() -> bool:
    """Whether a launcher started this process as a rank.

    Raises:
        UsageError: if its variables do not make sense, as those that a shell was left with.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return False
    world_size = _variable("WORLD_SIZE", 1, MAX_WORLD_SIZE)
    _variable("RANK", 0, world_size - 1)
    _variable("LOCAL_RANK", 0, world_size - 1, default=0)
    _variable("LOCAL_WORLD_SIZE", 1, world_size, default=1)
    _variable("MASTER_PORT", 1, 65535)
    if not os.environ.get("MASTER_ADDR"):
        raise UsageError(f"MASTER_ADDR is not set, and RANK is; {_NOT_A_RANK}")
    return True


def _variable(name: str, least: int, most: int, default: int | None = None) -> int:
    """Return a variable of the launcher as an integer."""
    text = os.environ.get(name, "" if default is None else str(default))
    if text.isdecimal() and len(text) < 10 and least <= int(text) <= most:
        return int(text)
    raise UsageError(
        f"{name} must be an integer from {least} to {most}, got '{text}'; {_NOT_A_RANK}"
    )


def without_nohup(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Return signals to handle: under `nohup` SIGHUP is ignored, and stays so."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in numbers if not (ignored and number == signal.SIGHUP)]


def default_num_ranks(config: TrainConfig) -> int:
    """Return the ranks of one model replica, or of as many replicas as fit on the GPUs.

    Raises:
        UsageError: if the machine has GPUs, but too few for one replica.
    """
    replica = config.model_parallel_size
    try:
        ctypes.CDLL("libcuda.so.1")  # the driver's; without it there is no need to ask torch
    except OSError:
        return replica
    import torch

    gpus = torch.cuda.device_count()
    if 0 < gpus < replica:
        raise UsageError(
            f"the parallel sizes need {replica} GPUs, and this machine has {gpus}; reduce them, "
            "or train on the CPU (export CUDA_VISIBLE_DEVICES=)"
        )
    return max(replica, gpus // replica * replica)


def launch(config: TrainConfig, num_ranks: int) -> int:
    """Run a training on `num_ranks` ranks of this machine; return the exit status.

    Call it in the main thread: it handles signals from now on.

    Raises:
        UsageError: if there are too many ranks, or a rank refused its input.
        SnipError: if a rank failed for a reason that is one line.
    """
    if num_ranks > MAX_LOCAL_RANKS:
        raise UsageError(f"{num_ranks} ranks on one machine; at most {MAX_LOCAL_RANKS} are started")
    outlive_output()
    received: list[int] = []
    for number in without_nohup(_SIGNALS):
        signal.signal(number, lambda number, frame: received.append(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    ranks: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as files:
        # Ranks that come before the store wait in this socket's queue.
        listener = files.enter_context(socket.create_server((LOOPBACK, 0), backlog=num_ranks))
        port = listener.getsockname()[1]
        settings = files.enter_context(_unnamed_file())
        settings.write(settings_of_ranks(config))
        reports = [files.enter_context(_unnamed_file()) for _ in range(num_ranks)]
        try:
            for rank, report in enumerate(reports):
                ranks.append(_start_rank(rank, num_ranks, port, settings, report))
            _store = _serve_store(listener)  # answers as long as it is referenced
            late = _wait(ranks, received, reports, EXIT_S if config.save is None else SAVE_S)
            statuses = [process.returncode or 0 for process in ranks]
            kind, reason = _first_failure(reports)
            if not received:
                _let_end(ranks)
        finally:
            for process in ranks:  # and its children, such as Megatron's checkpoint writers
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if SAVED_AND_STOPPED in statuses:
            return SAVED_AND_STOPPED
    if received:
        text = f"; no answer from rank {', '.join(map(str, late))}" if late else ""
        text += f"; {reason}" if kind == "error" else ""
        text += "; without --save nothing can be resumed" if config.save is None else ""
        print(f"megatron-snip: ended by {_signal_name(received[0])}{text}", file=sys.stderr)
        return 128 + received[0]
    endings = [(rank, status) for rank, status in enumerate(statuses) if status]
    for rank, status in endings:
        if status < 0 and (not kind or status != -signal.SIGABRT):  # NCCL aborts for its peers
            raise SnipError(f"rank {rank} ended by {_signal_name(-status)}")
    if kind == "usage":
        raise UsageError(reason)
    if kind == "error":
        raise SnipError(reason)
    if kind == "crash":
        print(reason.rstrip(), file=sys.stderr)
        raise SnipError("training crashed; see above")
    for rank, status in endings:  # it did not come to write why
        raise SnipError(f"rank {rank} ended by exit code {status}")
    return 0


def _serve_store(listener: socket.socket) -> TCPStore:
    """Return the store where the ranks meet; rank 0's own would listen on all interfaces."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(
        LOOPBACK,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _unnamed_file() -> FileIO:
    """Return a file that ends with the processes that have it open; in memory on Linux."""
    if hasattr(os, "memfd_create"):
        return FileIO(os.memfd_create("megatron-snip"), "r+")
    with tempfile.TemporaryFile(buffering=0) as file:
        return FileIO(os.dup(file.fileno()), "r+")


def _read_whole(descriptor: int) -> bytes:
    """Return a file's content; its position, which processes share, stays."""
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


def settings_of_ranks(config: TrainConfig) -> bytes:
    """Return what every rank reads, JSON.

    Defaults are left out: a run lowers a target that is out of reach, but not one that was given.
    """
    return json.dumps(config.model_dump(mode="json", exclude_unset=True)).encode()


def _start_rank(
    rank: int, num_ranks: int, port: int, settings: FileIO, report: FileIO
) -> subprocess.Popen[bytes]:
    """Start a rank as the leader of a process group, so that its children end with it."""
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # the store is there: rank 0 makes none
        "TORCHELASTIC_RESTART_COUNT": 0,
    }
    files = (settings.fileno(), report.fileno())
    words = [sys.executable, "-u", "-P", "-m", "megatron_snip.trainer.launch"]
    words += [str(number) for number in (*files, os.getpid())]
    environment = os.environ | {name: str(value) for name, value in variables.items()}
    return subprocess.Popen(words, env=environment, start_new_session=True, pass_fds=files)


def _wait(
    ranks: list[subprocess.Popen[bytes]],
    received: list[int],
    reports: Sequence[FileIO],
    exit_s: float,
) -> list[int]:
    """Wait until all ranks have ended or one has failed.

    If a signal comes first, it is sent to all ranks. Then waiting ends early after a second signal,
    after `exit_s`, or if a rank does not answer in `ANSWER_S`.

    Returns:
        The ranks that did not answer a signal.
    """
    while not received:
        statuses = [process.poll() for process in ranks]
        if None not in statuses or any(s not in (None, 0, SAVED_AND_STOPPED) for s in statuses):
            return []
        time.sleep(POLL_S)
    begin = time.monotonic()
    for process in ranks:
        process.send_signal(received[0])
    while running := [rank for rank, process in enumerate(ranks) if process.poll() is None]:
        late = [rank for rank in running if not _read_whole(reports[rank].fileno())]
        waited_s = time.monotonic() - begin
        if len(received) > 1 or waited_s > exit_s or (late and waited_s > ANSWER_S):
            return late
        time.sleep(POLL_S)
    return []


def _let_end(ranks: list[subprocess.Popen[bytes]]) -> None:
    """After a failure: wait a short time for ranks that lose their peer to close their files."""
    end = time.monotonic() + GRACE_S
    while any(process.poll() is None for process in ranks) and time.monotonic() < end:
        time.sleep(POLL_S)


def _first_failure(reports: Iterable[FileIO]) -> tuple[str, str]:
    """Return kind and text of the first error that a rank wrote, or empty texts."""
    written = [(math.inf, "", "")]
    for report in reports:
        lines = _read_whole(report.fileno()).decode(errors="replace").splitlines()
        for line in lines:
            with contextlib.suppress(ValueError):  # killed while it wrote
                written.append(tuple(json.loads(line)))
    return min(written)[1:]


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def train_as_rank(config: TrainConfig) -> TrainingResult:
    """Every rank of a launcher: prepare the process, train and return what `run_rank` does.

    Raises:
        UsageError: if the input is bad; every rank raises.
        SnipError: if a rank cannot continue.
    """
    outlive_output()
    # Before torch is imported and CUDA starts. The user's values win; ranks share the cores.
    threads = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, threads)))
    # Megatron orders its communication kernels by launch order, which needs one queue.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # Megatron and torch warn of missing Transformer Engine and of their own deprecated calls.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    for message in (
        r".torch\.distributed\..* is deprecated",
        "Please use DTensor instead",
        r"The \.grad attribute of a Tensor that is not a leaf",
    ):
        warnings.filterwarnings("ignore", message=message)
    from megatron_snip.patches import cpu

    cpu.install()  # before Megatron's import, which compiles its helpers
    from megatron_snip.trainer.session import run_rank

    return run_rank(config)


def _main(settings: int, report: int, launcher: int) -> int:
    """Be a rank that `launch` started; write the reason if the run fails."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    _answer_signals(report)
    if sys.platform == "linux":  # end if the launcher is killed
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
        if os.getppid() != launcher:  # it was killed already
            return 1
    from megatron_snip.trainer.config import make_train_config

    try:
        result = train_as_rank(make_train_config(json.loads(_read_whole(settings))))
        return 0 if result.stopped is None else SAVED_AND_STOPPED
    except (UsageError, UnsupportedError) as error:
        kind = "usage"
        text = str(error)
    except SnipError as error:
        kind = "error"
        text = str(error)
    except Exception as error:
        known = known_failure(error)
        kind = "crash" if known is None else "error"
        text = known or traceback.format_exc()
    _report(report, [time.time(), kind, text])
    return 1


def _report(file: int, line: list[object]) -> None:
    os.write(file, json.dumps(line).encode() + b"\n")


def _answer_signals(report: int) -> None:
    """Report a signal in a thread: the main one may wait for a stopped rank."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def answer() -> None:
        os.read(reader, 1)
        with contextlib.suppress(OSError):
            _report(report, [math.inf, "answered", ""])

    threading.Thread(target=answer, daemon=True).start()


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # once is enough
    sys.exit(128 + number)  # runs `finally` blocks, which close files


if __name__ == "__main__":
    sys.exit(_main(*map(int, sys.argv[1:])))

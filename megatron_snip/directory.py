"""Output directories: one writer at a time, and nothing is removed that SNIP did not write.

    DIR/.megatron-snip          marker: SNIP writes its files in this directory
    DIR/.megatron-snip.lock     held by the job that writes now (JSON: host, pid, Slurm job)

A file counts as written by SNIP if its directory has the marker and its path matches `OWN_FILES`.
The lock is made with O_EXCL, which is atomic on local file systems and on NFS from version 3 on. It
is taken over only if its holder is provably gone: the process has ended on this host, this host has
booted since, or Slurm says that the job has ended.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import psutil

from megatron_snip.errors import UsageError

MARKER = ".megatron-snip"
LOCK = ".megatron-snip.lock"

OWN_FOLDERS = ("plans", "problems", "divergences", "health", "precision")
"""Folders of a marked directory that hold one file per iteration."""

OWN_FILES = re.compile(
    r"config\.yaml|versions\.json|data\.json|calibration\.json|metrics\.jsonl"
    rf"|({'|'.join(OWN_FOLDERS)})/\d+\.json"
    r"|tensorboard/events\.out\.tfevents\.[^/]*"
    r"|report\.html|report/[a-z0-9-]+\.(png|svg|html|json)"
)
"""Paths below a marked directory that SNIP writes."""

_ATTEMPTS = 20
_MAX_LOCK_BYTES = 4096
_SQUEUE_TIMEOUT_S = 10


def own_files(directory: Path) -> Iterator[Path]:
    """Yield the files below `directory` whose paths match `OWN_FILES`; links are not followed."""
    for name, entry in _entries_below(directory):
        if entry.is_file(follow_symlinks=False) and OWN_FILES.fullmatch(name):
            yield Path(entry)


def check_new_run(directory: Path, overwrite: bool) -> None:
    """Refuse to start a new run where its files would replace others.

    Args:
        directory: need not exist.
        overwrite: whether files of a former run may be replaced.

    Raises:
        UsageError: if the directory holds another run and `overwrite` is not set, or holds files
            with SNIP's names that SNIP did not write: without the marker, or links and pipes.
    """
    for name, entry in _entries_below(directory):
        is_own = OWN_FILES.fullmatch(name) or name in OWN_FOLDERS
        plain = entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)
        if is_own and not plain:
            raise UsageError(
                f"'{directory / name}' is a link or a pipe, and SNIP's files would go through it; "
                "remove it, or name another directory"
            )
    present = next(own_files(directory), None)
    if present is None:
        return
    if not (directory / MARKER).is_file():
        raise UsageError(
            f"'{directory}' holds '{present.relative_to(directory)}' but not the marker "
            f"'{MARKER}' of a SNIP run; name another directory (if an earlier megatron-snip wrote "
            f"it, create the marker: touch '{directory / MARKER}')"
        )
    if not overwrite:
        raise UsageError(
            f"'{directory}' holds another run; continue it with --load, name another directory, "
            "or replace its files with --overwrite"
        )


def mark(directory: Path) -> None:
    """Make the directory and put the marker in it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / MARKER).touch()


def clear_run(directory: Path, archive: bool) -> Path | None:
    """Take the files of a former run out of a marked directory, and folders left empty by that.

    Args:
        directory: the run's.
        archive: whether they move to a new folder `previous-N` below it, or are deleted.

    Returns:
        The new folder; None if there is none.
    """
    assert (directory / MARKER).is_file(), "only a marked directory holds files of SNIP"
    names = (directory / f"previous-{number}" for number in count(1))
    target = next(path for path in names if not path.exists())
    files = list(own_files(directory))
    for path in files:
        if archive:
            moved = target / path.relative_to(directory)
            moved.parent.mkdir(parents=True, exist_ok=True)
            path.rename(moved)
        else:
            path.unlink(missing_ok=True)
        if path.parent != directory:
            with contextlib.suppress(OSError):  # it holds other files
                path.parent.rmdir()
    if not (archive and files):
        return None
    mark(target)
    return target


def lock_directory(directory: Path) -> Callable[[], None]:
    """Take the lock of a directory, which is made if need be.

    Returns:
        A function that releases the lock; it may be called more than once. After the end of this
        process other jobs take the lock over.

    Raises:
        UsageError: if another job holds it; one line names its host, process and Slurm job.
        OSError: if the directory cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / LOCK
    own = _this_process()
    for _ in range(_ATTEMPTS):
        if _create(path, own):
            return partial(_release, path, own["token"])
        holder = _read(path)
        if holder is None:  # released in between
            continue
        if not _is_gone(holder):
            raise UsageError(
                f"'{directory}' is in use by {_describe(holder)}; wait for it, or name another "
                f"directory (if that job has ended, delete '{path}')"
            )
        _remove_stale(path, holder)
    raise UsageError(
        f"'{directory}' is contended: could not take '{path}'; try again, or delete '{path}*' if "
        "no job writes there"
    )


def _entries_below(directory: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield the entries of a directory and of its folders, with their paths below it."""
    for entry in _entries(directory):
        yield entry.name, entry
        if entry.is_dir(follow_symlinks=False):
            yield from ((f"{entry.name}/{inner.name}", inner) for inner in _entries(Path(entry)))


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _this_process() -> dict[str, Any]:
    restarts = os.environ.get("SLURM_RESTART_COUNT", "")
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": _start_time(os.getpid()),
        "boot": _boot_and_namespace(),
        "job": os.environ.get("SLURM_JOB_ID"),
        "restart": int(restarts) if restarts.isdecimal() else 0,
        "since": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "token": secrets.token_hex(8),
    }


def _create(path: Path, content: dict[str, Any]) -> bool:
    """Make the lock; return False if there is one. One without content is held, too."""
    try:
        stream = path.open("x", encoding="utf-8")
    except FileExistsError:
        return False
    try:
        with stream:
            stream.write(json.dumps(content) + "\n")
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return True


def _read(path: Path) -> dict[str, Any] | None:
    """Return a lock's content; {} if it cannot be understood, None if there is no lock."""
    if path.is_fifo():  # to open it would wait
        return {}
    try:
        with path.open("rb") as stream:
            value = json.loads(stream.read(_MAX_LOCK_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _release(path: Path, token: str) -> None:
    """Remove a lock if it is still the one with this token."""
    holder = _read(path)
    if holder is not None and holder.get("token") == token:
        path.unlink(missing_ok=True)


def _remove_stale(path: Path, holder: dict[str, Any]) -> None:
    """Remove a lock whose holder is gone, unless another job has taken it meanwhile.

    One process at a time may remove this holder's lock: the one that made the claim file.
    """
    name = hashlib.sha256(json.dumps(holder, sort_keys=True).encode()).hexdigest()[:16]
    claim = path.with_name(f"{path.name}.{name}.claim")
    if not _create(claim, _this_process()):
        time.sleep(0.05)  # the other process may be writing it
        claimant = _read(claim)
        if claimant and _is_gone(claimant):
            claim.unlink(missing_ok=True)
        return
    try:
        if _read(path) == holder:
            path.unlink(missing_ok=True)
    finally:
        claim.unlink(missing_ok=True)


def _is_gone(holder: dict[str, Any]) -> bool:
    """Whether the process that holds a lock has provably ended."""
    own = _this_process()
    if holder.get("host") == own["host"] and isinstance(holder.get("pid"), int):
        if holder.get("boot") == own["boot"]:
            started = _start_time(holder["pid"])
            return started is None or started != holder.get("started", started)
        if _boot_of(holder.get("boot")) != _boot_of(own["boot"]):
            return True
    job = holder.get("job")
    if not isinstance(job, str) or not job.isdecimal():
        return False
    if job == own["job"]:
        before = holder.get("restart")
        return isinstance(before, int) and bool(own["restart"] > before)
    return _slurm_job_has_ended(job)


def _slurm_job_has_ended(job: str) -> bool:
    squeue = shutil.which("squeue")
    if squeue is None:
        return False
    command = [squeue, "--noheader", "--states=all", "--format=%T", f"--jobs={job}"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=_SQUEUE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    if answer.returncode != 0:
        return "Invalid job id" in answer.stderr  # Slurm has forgotten it
    states = set(answer.stdout.split())
    return states <= {
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"),
        *("OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
    }


def _start_time(pid: int) -> str | None:
    """Return when a process of this host started, in clock ticks; None if it does not run."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        has_proc = Path("/proc/self/stat").exists()
        return "unknown" if not has_proc and psutil.pid_exists(pid) else None
    fields = status.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]


def _boot_and_namespace() -> str:
    """Return what identifies this boot of the host and this process's PID namespace."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return "unknown"


def _boot_of(identity: Any) -> str:
    return str(identity).split(" ")[0]


def _describe(holder: dict[str, Any]) -> str:
    if not holder:
        return "another job (its lock cannot be read)"
    job = f", Slurm job {holder['job']}" if holder.get("job") else ""
    return (
        f"process {holder.get('pid')} on host {holder.get('host')}{job}, "
        f"since {holder.get('since')}"
    )

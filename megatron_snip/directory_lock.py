"""The lock of an output directory: one job writes there at a time.

    DIR/.megatron-snip.lock     locked by the process that writes now; its text names that process

The lock is a `flock`, which the kernel releases when the process ends. Child processes do not hold
it. On some network file systems other hosts do not see a `flock`, or there is none. So the holder
also changes the file's mtime every `HEARTBEAT_S`. If the file names a process on another host, or
the file system has no `flock`, a job takes the lock only after the mtime has stayed the same for
`HEARTBEAT_TIMEOUT_S`. Not detected: two jobs that start at the same moment in a new directory, on
hosts that do not see each other's locks.
"""

import contextlib
import errno
import fcntl
import logging
import os
import re
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

from megatron_snip.errors import UsageError

logger = logging.getLogger(__name__)

LOCK = ".megatron-snip.lock"

HEARTBEAT_S = 10.0
HEARTBEAT_TIMEOUT_S = 35.0
SETTLE_S = 3.0
_MAX_HOLDER_BYTES = 400
_held: set[int] = set()
"""Descriptors of the locks of this process; forks close theirs."""

_CANNOT_LOCK = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)


def lock_directory(directory: Path) -> Callable[[], None]:
    """Lock a directory, which is made if need be.

    If the kernel cannot know whether it is held, this waits up to `HEARTBEAT_TIMEOUT_S`, and
    `SETTLE_S` more before it takes the lock.

    Returns:
        A function that releases the lock; it may be called more than once.

    Raises:
        UsageError: if it is locked; one line names the holder's host, process and Slurm job. Or
            if the lock's file cannot be written or is no regular file.
        OSError: if the directory cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / LOCK
    while True:
        with contextlib.ExitStack() as cleanup:
            descriptor = _open(path)
            _held.add(descriptor)
            cleanup.callback(_close, descriptor)
            holder = _holder(descriptor)
            try:
                is_unsure = _may_be_held(holder, _lock(descriptor))
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    # `flock` names no file.
                    raise OSError(error.errno, error.strerror, str(path)) from None
                raise _in_use(path, holder) from None
            if is_unsure and _is_beating(path, holder):
                raise _in_use(path, _holder(descriptor))
            if _is_at(path, descriptor):  # else it was removed after we opened it: try again
                own = _this_process()
                try:
                    os.ftruncate(descriptor, os.pwrite(descriptor, own.encode(), 0))
                    os.fsync(descriptor)  # other hosts read it
                except OSError as error:
                    raise OSError(error.errno, error.strerror, str(path)) from None
                if is_unsure:
                    time.sleep(SETTLE_S)  # another job may have watched the same holder
                    if (holder := _holder(descriptor)) != own:
                        raise _in_use(path, holder)
                cleanup.callback(_remove, path, descriptor, own)
                cleanup.callback(_start_beating(descriptor, own))
                return cleanup.pop_all().close


def _open(path: Path) -> int:
    no_file = f"'{path}' is no regular file; remove it, or name another directory"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):  # a link, folder or socket
            raise UsageError(no_file) from None
        if error.errno == errno.EACCES and path.exists():
            raise UsageError(
                f"'{path}' cannot be written (is it another user's?); name another directory, or "
                "delete it if no job writes there"
            ) from None
        raise
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise UsageError(no_file)


def _lock(descriptor: int) -> bool:
    """Return False if the file system has no locks; raise what `flock` does if it is held."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _CANNOT_LOCK:
            raise
        return False
    return True


def _may_be_held(holder: str, is_locked: bool) -> bool:
    """Whether the process that a lock file names may live although the kernel does not hold it."""
    return bool(holder) and not (is_locked and f" on host {_host()}," in holder)


def _is_beating(path: Path, holder: str) -> bool:
    """Return whether the file's mtime changes; the server's clock may differ from this host's."""
    logger.warning(
        "snip: waiting %g s: '%s' may be in use by %s", HEARTBEAT_TIMEOUT_S, path.parent, holder
    )
    first = _changed_at(path)
    end = time.monotonic() + HEARTBEAT_TIMEOUT_S
    now = first
    while first is not None and now == first and time.monotonic() < end:
        time.sleep(min(1.0, HEARTBEAT_TIMEOUT_S / 10))
        now = _changed_at(path)
    return now not in (first, None)  # None: the holder has removed it


def _changed_at(path: Path) -> int | None:
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            return os.fstat(descriptor).st_mtime_ns  # NFS asks the server when a file is opened
        finally:
            os.close(descriptor)
    return None


def _start_beating(descriptor: int, own: str) -> Callable[[], None]:
    """Change the file's mtime every `HEARTBEAT_S` in a thread; return what ends it."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(HEARTBEAT_S):
            with contextlib.suppress(OSError):
                # Another job may have taken the lock while this process was suspended.
                if (holder := _holder(descriptor)) not in (own, ""):
                    logger.error(
                        "snip: lost an output directory to %s; both may write there", holder
                    )
                    return
                os.utime(descriptor)

    thread = threading.Thread(target=beat, name="snip-lock", daemon=True)
    thread.start()

    def end() -> None:
        ended.set()
        thread.join()

    return end


def _is_at(path: Path, descriptor: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    return False


def _remove(path: Path, descriptor: int, own: str) -> None:
    with contextlib.suppress(OSError):
        if descriptor in _held and _is_at(path, descriptor) and _holder(descriptor) in (own, ""):
            path.unlink(missing_ok=True)


def _in_use(path: Path, holder: str) -> UsageError:
    return UsageError(
        f"'{path.parent}' is in use by {holder or 'another job'}; wait for it, or name another "
        f"directory (if that host has crashed, delete '{path}')"
    )


def _close(descriptor: int) -> None:
    if descriptor in _held:
        _held.remove(descriptor)
        os.close(descriptor)


def _close_held() -> None:
    while _held:
        with contextlib.suppress(OSError):
            os.close(_held.pop())


os.register_at_fork(after_in_child=_close_held)  # data loaders and checkpoint writers are forks


def _this_process() -> str:
    job = re.sub(r"\W", "", os.environ.get("SLURM_JOB_ID", ""), flags=re.ASCII)[:40]
    where = _host() + (f", Slurm job {job}" if job else "")
    return f"process {os.getpid()} on host {where}, since {time.strftime('%Y-%m-%dT%H:%M:%S%z')}"


def _host() -> str:
    return re.sub(r"[^\w.-]", "_", socket.gethostname(), flags=re.ASCII)[:200]


def _holder(descriptor: int) -> str:
    text = os.pread(descriptor, _MAX_HOLDER_BYTES, 0).decode(errors="replace")
    known = re.fullmatch(r"process \d+ on host [ -~]+, since [\d:T+-]+", text)
    return text if known else ""  # empty, half written, or not SNIP's

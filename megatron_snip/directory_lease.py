"""The lease of an output directory: the one job that writes there.

    DIR/.megatron-snip.lock     one line of JSON: the job that holds the lease (`Holder`)

A job takes the lease at its start, without waiting, and asks before each write whether it still
has it. If another job has taken it, the older one stops writing. The file is also locked by
`flock`, which the kernel releases when the process ends; forks do not hold it. So a job that finds
a lease is in one of these cases:

    the kernel shows that it is held     refused, unless this is a newer attempt of the same job
    its holder has ended                 taken
    the kernel does not know: another    taken by a newer attempt of the same job or a job of the
    host, or no `flock` there            the directory's own run; by others once it was not renewed
                                         for `STALE_S`
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import socket
import stat
import time
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from megatron_snip.errors import UsageError
from megatron_snip.files import Label

LOCK = ".megatron-snip.lock"

STALE_S = 120.0
RENEW_S = 10.0
_MAX_BYTES = 2000
_CANNOT_LOCK = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)

_held: set[int] = set()
"""Descriptors of the leases of this process; forks close theirs."""


class Holder(BaseModel):
    """The job that holds a lease.

    Attributes:
        token: No other lease has the same.
        host: Its host.
        pid: Its process there.
        since: When it took the lease.
        job: The scheduler's or torchrun's name of the job; "" without one.
        attempt: How often each of the two has restarted the job.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    token: Label
    host: Label
    pid: int
    since: Label
    job: Label = ""
    attempt: list[int] = []

    def __str__(self) -> str:
        job = f", job {self.job}" if self.job else ""
        return f"process {self.pid} on host {self.host}{job}, since {self.since}"

    def follows(self, other: "Holder") -> bool:
        """Whether this is a newer attempt of the other's job."""
        return self.job == other.job != "" and self.attempt > other.attempt

    def has_ended(self) -> bool:
        """Whether its process was one of this host and is gone."""
        if self.host != _host():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except (PermissionError, OverflowError):
            pass  # another user's process; a number from a damaged file
        return False


class Lease:
    """A lease that this process has taken."""

    def __init__(self, path: Path, descriptor: int, holder: Holder) -> None:
        """Keep a lease that was written.

        Args:
            path: Its file.
            descriptor: The open file, locked where that is possible.
            holder: This process.
        """
        self._path = path
        self._descriptor = descriptor
        self._holder = holder
        self._renewed_at = time.monotonic()

    def lost_to(self) -> str | None:
        """Return the job that has taken the lease since; None if it is still ours, and renew it.

        A file that was deleted has no other holder.

        Raises:
            OSError: if the file cannot be read.
        """
        text = _read(self._path)
        if text is not None and (holder := _holder(text)) != self._holder:
            return _name(holder)
        now = time.monotonic()
        if now - self._renewed_at > RENEW_S and self._descriptor in _held:
            self._renewed_at = now
            os.utime(self._descriptor)
        return None

    def release(self) -> None:
        """Give the lease back, if this process still has it; may be called more than once."""
        if self._descriptor not in _held:
            return
        with contextlib.suppress(OSError):
            if self.lost_to() is None:
                self._path.unlink(missing_ok=True)
        _close(self._descriptor)


def take_lease(directory: Path, continues: bool = False) -> Lease:
    """Take the lease of a directory, which is made if need be. Nothing is waited for.

    Args:
        directory: The directory.
        continues: Whether this job resumes the run whose directory it is.

    Raises:
        UsageError: if another job has it; one line names its host and process. Or if the file
            cannot be written or is no regular file.
        OSError: if the directory cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / LOCK
    own = _this_process()
    # Written and locked under another name first: at its place a lease is never empty or unlocked.
    temporary = path.with_name(f"{LOCK}.{own.token[:8]}")
    with contextlib.ExitStack() as cleanup:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        descriptor = os.open(temporary, flags, 0o666)
        cleanup.callback(temporary.unlink, missing_ok=True)
        _held.add(descriptor)
        undo = contextlib.ExitStack()  # unless the lease is ours in the end
        undo.callback(_close, descriptor)
        with undo:
            _lock(descriptor, path)
            try:
                os.write(descriptor, own.model_dump_json().encode() + b"\n")
                os.fsync(descriptor)  # other hosts read it
            except OSError as error:  # these calls name no file
                raise OSError(error.errno, error.strerror, str(path)) from None
            # The server's clock, with which the age of a lease is compared.
            now = os.fstat(descriptor).st_mtime
            # At each turn another job has taken or given back the lease in between.
            while not _publish(temporary, path, own, now, continues):
                pass
            lease = Lease(path, descriptor, own)
            if (other := lease.lost_to()) is not None:  # taken at the same moment
                raise _in_use(path, other)
            undo.pop_all()
            return lease


def _publish(temporary: Path, path: Path, own: Holder, now: float, continues: bool) -> bool:
    """Put the new lease in its place if that is free; False if the place has changed meanwhile.

    Raises:
        UsageError: if another job has the lease.
    """
    try:
        former = _open(path)
    except FileNotFoundError:
        try:
            os.link(temporary, path)  # unlike a rename, only where there is none
        except FileExistsError:
            return False
        except OSError:  # a file system without links
            os.rename(temporary, path)
        return True
    try:
        text = os.pread(former, _MAX_BYTES, 0).decode(errors="replace")
        holder = _holder(text)
        age_s = now - os.fstat(former).st_mtime
        is_newer = holder is not None and own.follows(holder)
        try:
            # Of several jobs that find an ended one, one gets this lock and the others end here.
            knows = _lock(former, path)
        except BlockingIOError:
            if not is_newer:  # a newer attempt need not wait for the end of the older one
                raise _in_use(path, _name(holder)) from None
            knows = False
        # Between opening and locking another job may have put its lease there.
        if not _is_at(path, former):
            return False
        # The lock of a holder of this host could be taken: the kernel has released it at its end.
        # Of another host's holder that is no sign, because not every file system shares locks.
        has_ended = holder is not None and (
            holder.has_ended() or (knows and holder.host == _host())
        )
        if not (has_ended or is_newer or continues or age_s > STALE_S):
            raise _in_use(path, _name(holder), f" (last renewed {max(age_s, 0.0):.0f} s ago)")
        os.replace(temporary, path)
        return True
    finally:
        os.close(former)


def _open(path: Path) -> int:
    no_file = f"'{path}' is no regular file; remove it, or name another directory"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):  # a link, folder or socket
            raise UsageError(no_file) from None
        if error.errno == errno.EACCES:
            raise UsageError(
                f"'{path}' cannot be written (is it another user's?); name another directory, or "
                "delete it if no job writes there"
            ) from None
        raise
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise UsageError(no_file)


def _read(path: Path) -> str | None:
    """Return the text of a lease; None without one. NFS asks the server when a file is opened."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        return os.read(descriptor, _MAX_BYTES).decode(errors="replace")
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> bool:
    """Lock a file, which errors call `path`; return False if the file system has no locks.

    Raises:
        BlockingIOError: if another process holds it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise BlockingIOError(error.errno, error.strerror) from None
        if error.errno not in _CANNOT_LOCK:
            raise OSError(error.errno, error.strerror, str(path)) from None
        return False
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    return False


def _holder(text: str) -> Holder | None:
    """Return the holder that a lease names; None if the text is no lease."""
    try:
        return Holder.model_validate_json(text)
    except ValidationError:
        return None


def _name(holder: Holder | None) -> str:
    return "another job" if holder is None else str(holder)


def _in_use(path: Path, holder: str, renewed: str = "") -> UsageError:
    return UsageError(
        f"'{path.parent}' is in use by {holder}{renewed}; wait for it, or name another directory "
        f"(if that host has crashed, delete '{path}')"
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


def _this_process() -> Holder:
    elastic = os.environ.get("TORCHELASTIC_RUN_ID", "")
    job = os.environ.get("SLURM_JOB_ID", "") or ("" if elastic == "none" else elastic)
    restarts = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
    return Holder(
        token=secrets.token_hex(16),
        host=_host(),
        pid=os.getpid(),
        since=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        job=re.sub(r"[^\w.-]", "_", job, flags=re.ASCII)[:80],
        attempt=[_number(os.environ.get(name, "")) for name in restarts],
    )


def _number(text: str) -> int:
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else 0


def _host() -> str:
    return re.sub(r"[^\w.-]", "_", socket.gethostname(), flags=re.ASCII)[:200]

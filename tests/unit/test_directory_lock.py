"""The lock of an output directory, with processes that hold it, die, stop or live elsewhere."""

import errno
import fcntl
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest

from megatron_snip.directory_lock import LOCK, lock_directory
from megatron_snip.errors import UsageError

HOLD = """
import os, sys, time
from pathlib import Path
from megatron_snip import directory_lock
from megatron_snip.directory_lock import lock_directory
directory_lock.HEARTBEAT_S = 0.05
release = lock_directory(Path(sys.argv[1]))
holder = os.getpid()
if "fork" in sys.argv and os.fork() == 0:
    while os.getppid() == holder:
        time.sleep(0.01)
    print("orphan", flush=True)
    sys.stdin.readline()
    print("end", flush=True)
    sys.exit()
print("held", flush=True)
sys.stdin.readline()
release()
print("released", flush=True)
time.sleep(600)
"""


@pytest.fixture
def no_kernel_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks, and heartbeats that need not be waited for long."""
    for name in ("HEARTBEAT_TIMEOUT_S", "SETTLE_S"):
        monkeypatch.setattr(f"megatron_snip.directory_lock.{name}", 0.2)
    monkeypatch.setattr(fcntl, "flock", Mock())


@contextmanager
def holding(directory: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Within: another process has the lock. It releases it when it reads a line."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory), *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def said(process: subprocess.Popen[str]) -> str:
    return process.stdout.readline().strip()


def refusal(directory: Path) -> str:
    """Return why the lock is refused; an empty text if it is not, and then it is released."""
    try:
        lock_directory(directory)()
    except UsageError as error:
        return str(error)
    return ""


def test_the_second_writer_is_refused_with_the_holders_name_until_the_lock_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    with holding(tmp_path) as process:
        assert said(process) == "held"
        who = f"process {process.pid} on host {socket.gethostname()}, Slurm job 12, since 2"
        for _ in range(2):  # a refused job leaves the lock alone
            assert f"in use by {who}" in refusal(tmp_path)
        (tmp_path / LOCK).write_bytes(b"[" * 5000)
        assert "in use by another job; wait" in refusal(tmp_path)
        shutil.copytree(tmp_path, tmp_path.with_name("copy"))  # reading it releases nothing
        assert "in use" in refusal(tmp_path)
        print(file=process.stdin, flush=True)
        assert said(process) == "released"
        assert not list(tmp_path.iterdir())
        release = lock_directory(tmp_path)
        assert f"process {os.getpid()} " in refusal(tmp_path)  # also by its own process
        release()
        release()
    assert not list(tmp_path.iterdir())


def test_a_lock_that_its_holder_removes_meanwhile_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", real)
        (tmp_path / LOCK).unlink()
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    release = lock_directory(tmp_path)
    with holding(tmp_path) as process:
        assert said(process) == ""  # refused
    release()
    assert not list(tmp_path.iterdir())


def test_a_killed_jobs_lock_is_free_although_its_child_lives(tmp_path: Path) -> None:
    with holding(tmp_path, "fork") as process:
        assert said(process) == "held"
        assert f"process {process.pid} " in refusal(tmp_path)
        process.kill()
        assert said(process) == "orphan"
        assert refusal(tmp_path) == ""
        print(file=process.stdin, flush=True)
        assert said(process) == "end"  # it lived until now


def test_of_many_processes_one_gets_the_lock(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text('{"host": "node7", "pid": 1, "boot": "1", "token": "1"}')
    with ExitStack() as processes:
        started = [processes.enter_context(holding(tmp_path)) for _ in range(4)]
        assert sorted(map(said, started)) == ["", "", "", "held"]


def test_a_lock_that_is_a_link_or_a_pipe_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / LOCK).symlink_to(tmp_path / "mine.txt")
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / LOCK)
    for name in ("link", "pipe"):
        with pytest.raises(UsageError, match="is no regular file"):
            lock_directory(tmp_path / name)
    assert (tmp_path / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("kernel", [Mock(), Mock(side_effect=OSError(errno.ENOLCK, "No locks"))])
def test_where_the_kernel_locks_on_one_host_only_a_living_job_on_another_is_seen(
    tmp_path: Path,
    kernel: Mock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(fcntl, "flock", kernel)
    monkeypatch.setattr(socket, "gethostname", lambda: "node2")
    monkeypatch.setattr("megatron_snip.directory_lock.HEARTBEAT_TIMEOUT_S", 60.0)
    with holding(tmp_path) as process:
        assert said(process) == "held"
        assert f"in use by process {process.pid} on host " in refusal(tmp_path)
        print(file=process.stdin, flush=True)
        assert said(process) == "released"
        assert refusal(tmp_path) == ""
        assert caplog.text.count("waiting 60 s") == 1
    with holding(tmp_path) as process:
        assert said(process) == "held"
        process.kill()
        process.wait()
        monkeypatch.setattr("megatron_snip.directory_lock.HEARTBEAT_TIMEOUT_S", 0.5)
        assert refusal(tmp_path) == ""  # it has ended


@pytest.mark.usefixtures("no_kernel_locks")
def test_a_job_that_was_stopped_leaves_the_lock_of_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = lock_directory(tmp_path)  # beats too seldom for the next one
    monkeypatch.setattr(socket, "gethostname", lambda: "node2")
    release_next = lock_directory(tmp_path)
    release()
    assert "on host node2," in (tmp_path / LOCK).read_text()
    release_next()
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("no_kernel_locks")
def test_of_two_jobs_that_watch_the_same_dead_one_the_last_to_write_gets_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, other = (f"process 7 on host node{i}, since 2026-11-23T00:00:00+0000" for i in (8, 9))
    (tmp_path / LOCK).write_text(dead)
    sync = os.fsync

    def write_too(descriptor: int) -> None:
        sync(descriptor)
        os.pwrite(descriptor, other.encode().ljust(200), 0)
        os.ftruncate(descriptor, len(other))

    monkeypatch.setattr(os, "fsync", write_too)
    assert f"in use by {other}" in refusal(tmp_path)
    assert (tmp_path / LOCK).read_text() == other


@pytest.mark.parametrize("number", [errno.EIO, errno.EPERM])
def test_a_failed_lock_is_an_error(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(number, "no lock")))
    with pytest.raises(OSError, match="no lock"):
        lock_directory(tmp_path)


def test_an_error_of_flock_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with pytest.raises(OSError, match=rf"Input/output error: .*{LOCK}'"):
        lock_directory(tmp_path)

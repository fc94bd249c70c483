"""The lease of an output directory, with jobs that hold it, die, restart or live elsewhere."""

import errno
import fcntl
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from unittest.mock import Mock

import pytest

from megatron_snip import directory_lease
from megatron_snip.directory_lease import LOCK, STALE_S, Lease, take_lease
from megatron_snip.errors import UsageError

HOLD = """
import os, sys, time
from pathlib import Path
from megatron_snip.directory_lease import take_lease
lease = take_lease(Path(sys.argv[1]))
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
lease.release()
print("released", flush=True)
time.sleep(600)
"""
NO_LOCKS = Mock(side_effect=OSError(errno.ENOLCK, "No locks"))
ON_ONE_HOST = Mock()
"""Stands for `flock` on a file system where other hosts do not see it."""


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


def refusal(directory: Path, continues: bool = False) -> str:
    """Return why the lease is refused; an empty text if it is not, and then it is given back."""
    try:
        take_lease(directory, continues).release()
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("continues", [False, True])
def test_the_second_writer_is_refused_with_the_holders_name_until_the_lease_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, continues: bool
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    with holding(tmp_path) as process:
        assert said(process) == "held"
        who = f"process {process.pid} on host {socket.gethostname()}, job 12, since 2"
        for _ in range(2):  # a refused job leaves the lease alone
            assert f"in use by {who}" in refusal(tmp_path, continues)
        (tmp_path / LOCK).write_bytes(b"[" * 5000)
        assert "in use by another job; wait" in refusal(tmp_path, continues)
        # Reading it releases nothing.
        shutil.copytree(tmp_path, tmp_path.with_name(f"{tmp_path.name}-copy"))
        assert "in use" in refusal(tmp_path, continues)
    (tmp_path / LOCK).unlink()
    with holding(tmp_path) as process:
        assert said(process) == "held"
        print(file=process.stdin, flush=True)
        assert said(process) == "released"
        assert not list(tmp_path.iterdir())
        lease = take_lease(tmp_path)
        assert f"process {os.getpid()} " in refusal(tmp_path, continues)  # by its own process too
        assert lease.lost_to() is None
        lease.release()
        lease.release()
    assert not list(tmp_path.iterdir())


def test_a_lease_that_its_holder_gives_back_meanwhile_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / LOCK).write_text("damaged")
    real = fcntl.flock
    calls = []

    def flock(descriptor: int, operation: int) -> None:
        calls.append(descriptor)
        if len(calls) == 2:  # the first one is that of the new file
            (tmp_path / LOCK).unlink()
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    lease = take_lease(tmp_path)
    with holding(tmp_path) as process:
        assert said(process) == ""  # refused
    lease.release()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kernel", [None, NO_LOCKS])
def test_a_killed_jobs_lease_is_free_although_its_child_lives(
    tmp_path: Path, kernel: Mock | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holding(tmp_path, "fork") as process:
        assert said(process) == "held"
        if kernel is not None:
            monkeypatch.setattr(fcntl, "flock", kernel)
        assert f"process {process.pid} " in refusal(tmp_path)
        process.kill()
        assert said(process) == "orphan"
        process.wait()
        assert refusal(tmp_path) == ""
        print(file=process.stdin, flush=True)
        assert said(process) == "end"  # it lived until now


@pytest.mark.parametrize("kernel_locks", [True, False])
@pytest.mark.parametrize("former", ["none", "stale"])
def test_of_many_jobs_at_once_one_has_the_lease_in_the_end(
    tmp_path: Path, kernel_locks: bool, former: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the kernel has no locks several may take a stale one; all but one have lost it then."""
    if not kernel_locks:
        monkeypatch.setattr(fcntl, "flock", NO_LOCKS)
    if former == "stale":
        (tmp_path / LOCK).write_text("damaged")
        os.utime(tmp_path / LOCK, (1e9, 1e9))
    taken: list[Lease] = []
    start = threading.Barrier(8)

    def job() -> None:
        start.wait()
        with suppress(UsageError):
            taken.append(take_lease(tmp_path))

    threads = [threading.Thread(target=job) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    holding_it = [lease for lease in taken if lease.lost_to() is None]
    assert len(holding_it) == 1
    if kernel_locks or former == "none":
        assert len(taken) == 1
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]
    for lease in taken:
        lease.release()
    assert not list(tmp_path.iterdir())


def test_of_many_processes_one_gets_the_lease(tmp_path: Path) -> None:
    with ExitStack() as processes:
        started = [processes.enter_context(holding(tmp_path)) for _ in range(4)]
        assert sorted(map(said, started)) == ["", "", "", "held"]


def test_a_lease_that_is_a_link_or_a_pipe_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / LOCK).symlink_to(tmp_path / "mine.txt")
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / LOCK)
    for name in ("link", "pipe"):
        with pytest.raises(UsageError, match="is no regular file"):
            take_lease(tmp_path / name)
        assert [path.name for path in (tmp_path / name).iterdir()] == [LOCK]
    assert (tmp_path / "mine.txt").read_text() == "mine"


@contextmanager
def of_job(monkeypatch: pytest.MonkeyPatch, host: str, **environment: str) -> Iterator[None]:
    """Within: this process is on another host, in a job of a scheduler or of torchrun."""
    with monkeypatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: host)
        for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID"):
            patch.delenv(name, raising=False)
        patch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
        for name, value in environment.items():
            patch.setenv(name, value)
        yield


@pytest.mark.parametrize("kernel", [ON_ONE_HOST, NO_LOCKS])
@pytest.mark.parametrize(
    ("first", "second", "continues", "is_taken"),
    [
        ({}, {}, False, False),
        ({}, {}, True, True),  # it resumes the directory's run
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, False, True),
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7"}, False, False),
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1"}, False, False),
        (
            {"TORCHELASTIC_RUN_ID": "a"},
            {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "2"},
            False,
            True,
        ),
        (
            {"TORCHELASTIC_RUN_ID": "none"},  # torchrun's, where nobody gives one
            {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "2"},
            False,
            False,
        ),
    ],
)
def test_where_the_kernel_does_not_know_restarts_take_the_lease_at_once_and_others_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kernel: Mock,
    first: dict[str, str],
    second: dict[str, str],
    continues: bool,
    is_taken: bool,
) -> None:
    monkeypatch.setattr(fcntl, "flock", kernel)
    monkeypatch.setattr(time, "sleep", Mock(side_effect=AssertionError("it waits")))
    with of_job(monkeypatch, "node1", **first):
        old = take_lease(tmp_path)
    with of_job(monkeypatch, "node2", **second):
        if not is_taken:
            text = refusal(tmp_path, continues)
            assert "on host node1" in text and "(last renewed 0 s ago)" in text
            assert old.lost_to() is None
            old.release()
            assert not list(tmp_path.iterdir())
            return
        new = take_lease(tmp_path, continues)
    lost = old.lost_to()
    assert lost is not None and "on host node2" in lost
    old.release()  # it leaves the lease of the newer job
    assert new.lost_to() is None
    new.release()
    assert not list(tmp_path.iterdir())


def test_a_newer_attempt_takes_the_lease_although_the_older_one_still_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = {"SLURM_JOB_ID": "7"}
    with of_job(monkeypatch, "node1", **job):
        old = take_lease(tmp_path)
    with of_job(monkeypatch, "node1", **job, SLURM_RESTART_COUNT="1"):
        new = take_lease(tmp_path)
    with of_job(monkeypatch, "node1", **job):  # an older attempt does not take it back
        assert "is in use by" in refusal(tmp_path)
    assert old.lost_to() is not None and new.lost_to() is None
    new.release()
    old.release()


def test_a_lease_on_another_host_is_free_once_it_is_not_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", NO_LOCKS)
    with of_job(monkeypatch, "node1"):
        old = take_lease(tmp_path)
    long_ago = time.time() - STALE_S - 60
    os.utime(tmp_path / LOCK, (long_ago, long_ago))
    monkeypatch.setattr(directory_lease, "RENEW_S", -1.0)
    assert old.lost_to() is None  # a write renews it
    assert "on host node1" in refusal(tmp_path)
    os.utime(tmp_path / LOCK, (long_ago, long_ago))
    assert refusal(tmp_path) == ""


def test_a_lease_that_was_deleted_is_nobody_elses(tmp_path: Path) -> None:
    lease = take_lease(tmp_path)
    (tmp_path / LOCK).unlink()
    assert lease.lost_to() is None
    other = take_lease(tmp_path)
    assert lease.lost_to() is not None
    lease.release()
    assert other.lost_to() is None
    other.release()


def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", Mock(side_effect=OSError(errno.EPERM, "no links")))
    lease = take_lease(tmp_path)
    assert "is in use by" in refusal(tmp_path)
    lease.release()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [errno.EIO, errno.EPERM])
def test_a_failed_lock_is_an_error_and_leaves_no_file(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(number, "no lock")))
    with pytest.raises(OSError, match=rf"no lock: .*{LOCK}'"):
        take_lease(tmp_path)
    assert not list(tmp_path.iterdir())

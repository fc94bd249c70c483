"""Files are complete or absent; foreign files stay, and one job writes at a time."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest

from megatron_snip.directory import (
    LOCK,
    check_new_run,
    clear_run,
    lock_directory,
    mark,
    own_files,
)
from megatron_snip.errors import UsageError
from megatron_snip.files import parse_json, read_json, write_atomic


@pytest.mark.parametrize(
    "text", ["[NaN]", "[-Infinity]", "[1", "", "[" * 100_000, "9" * 5000, '["\\ud800"]', "[1,]"]
)
def test_what_is_no_json_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UsageError, match=r"^file is not valid JSON: .* at line 1 column \d+$"):
        parse_json(text, "file")


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b'{"a": "\xe9"}')
    for name in ("absent", "latin", "."):
        with pytest.raises(UsageError, match="plan file"):
            read_json(tmp_path / name, "plan file")


def test_writing_replaces_the_file_or_leaves_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    for value in ("old", {"new": 1}):
        write_atomic(path, json.dumps(value))
    monkeypatch.setattr(os, "replace", Mock(side_effect=OSError("no space left")))
    with pytest.raises(OSError, match="no space"):
        write_atomic(path, "newer")
    assert read_json(path, "plan") == {"new": 1}
    assert os.listdir(tmp_path) == ["plan.json"]


def test_a_pipe_is_written_to_and_a_link_to_one_is_replaced(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "plan.json"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    with pytest.raises(OSError, match="No such device or address"):
        write_atomic(pipe, "text")  # nobody reads it
    write_atomic(link, "text")
    assert link.read_text() == "text" and not link.is_symlink()
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_atomic(pipe, "text")
    assert os.read(reader, 100) == b"text"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


OWN = ("config.yaml", "metrics.jsonl", "plans/20.json", "tensorboard/events.out.tfevents.1.host")
FOREIGN = ("data/my.bin", "plans/best.json", "plans/notes/20.json", "wandb/run.bin", "slurm-1.out")


def fill(directory: Path, *names: str) -> None:
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def files(directory: Path) -> set[str]:
    return {str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()}


def test_foreign_files_do_not_keep_a_run_from_starting_and_are_never_removed(
    tmp_path: Path,
) -> None:
    fill(tmp_path, *FOREIGN)
    check_new_run(tmp_path, overwrite=False)
    mark(tmp_path)
    fill(tmp_path, *OWN)
    assert {str(p.relative_to(tmp_path)) for p in own_files(tmp_path)} == set(OWN)
    with pytest.raises(UsageError, match="holds another run"):
        check_new_run(tmp_path, overwrite=False)
    check_new_run(tmp_path, overwrite=True)
    clear_run(tmp_path, archive=False)
    assert files(tmp_path) == {*FOREIGN, ".megatron-snip"}
    assert not (tmp_path / "tensorboard").exists()


@pytest.mark.parametrize("name", OWN)
def test_a_file_of_our_name_in_a_folder_without_marker_is_foreign(
    tmp_path: Path, name: str
) -> None:
    fill(tmp_path, name)
    for overwrite in (False, True):
        with pytest.raises(UsageError, match="not the marker"):
            check_new_run(tmp_path, overwrite)


def test_links_are_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    fill(elsewhere, "20.json")
    run = tmp_path / "run"
    mark(run)
    for name in ("plans", "tensorboard"):
        (run / name).symlink_to(elsewhere)
    (run / "metrics.jsonl").symlink_to(elsewhere / "20.json")
    (run / "notes").symlink_to("n" * 300)  # even to ask whether it is a folder raises OSError
    assert list(own_files(run)) == []
    for name in ("metrics.jsonl", "plans", "tensorboard"):
        with pytest.raises(UsageError, match=f"{name}' is a link or a pipe"):
            check_new_run(run, overwrite=True)
        (run / name).unlink()
    (run / "report").symlink_to(elsewhere)  # written on request only
    os.mkfifo(run / "config.yaml")
    with pytest.raises(UsageError, match=r"config\.yaml' is a link or a pipe"):
        check_new_run(run, overwrite=False)


def test_an_earlier_attempt_is_moved_aside(tmp_path: Path) -> None:
    mark(tmp_path)
    assert clear_run(tmp_path, archive=True) is None
    for attempt in (1, 2):
        fill(tmp_path, *OWN, "plans/best.json")
        assert clear_run(tmp_path, archive=True) == tmp_path / f"previous-{attempt}"
        kept = files(tmp_path / f"previous-{attempt}")
        assert kept == {*OWN, ".megatron-snip"}
    assert (tmp_path / "plans" / "best.json").exists()


# ---- locks ------------------------------------------------------------------------------------

HOLD = """
import os, sys, time
from pathlib import Path
from megatron_snip import directory
from megatron_snip.directory import lock_directory
directory.HEARTBEAT_S = 0.05
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
    monkeypatch.setattr("megatron_snip.directory.HEARTBEAT_TIMEOUT_S", 60.0)
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
        monkeypatch.setattr("megatron_snip.directory.HEARTBEAT_TIMEOUT_S", 0.5)
        assert refusal(tmp_path) == ""  # it has ended


def test_a_job_that_was_stopped_leaves_the_lock_of_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HEARTBEAT_TIMEOUT_S", "SETTLE_S"):
        monkeypatch.setattr(f"megatron_snip.directory.{name}", 0.2)
    monkeypatch.setattr(fcntl, "flock", Mock())
    release = lock_directory(tmp_path)  # beats too seldom for the next one
    monkeypatch.setattr(socket, "gethostname", lambda: "node2")
    release_next = lock_directory(tmp_path)
    release()
    assert "on host node2," in (tmp_path / LOCK).read_text()
    release_next()
    assert not list(tmp_path.iterdir())


def test_of_two_jobs_that_watch_the_same_dead_one_the_last_to_write_gets_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HEARTBEAT_TIMEOUT_S", "SETTLE_S"):
        monkeypatch.setattr(f"megatron_snip.directory.{name}", 0.2)
    monkeypatch.setattr(fcntl, "flock", Mock())
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


def test_a_failed_lock_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.EIO, "I/O error")))
    with pytest.raises(OSError, match="I/O error"):
        lock_directory(tmp_path)

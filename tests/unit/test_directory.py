"""Output directories: foreign files stay, and one job writes at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from megatron_snip.__main__ import main
from megatron_snip.directory import (
    LOCK,
    check_new_run,
    clear_run,
    lock_directory,
    mark,
    own_files,
)
from megatron_snip.errors import UsageError

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
    (run / "plans").symlink_to(elsewhere)
    (run / "metrics.jsonl").symlink_to(elsewhere / "20.json")
    assert list(own_files(run)) == []
    for name in ("metrics.jsonl", "plans"):
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


def test_train_leaves_a_users_files_alone(tmp_path: Path, capsys: Any) -> None:
    fill(tmp_path, "data/my.bin", "metrics.jsonl")
    before = files(tmp_path)
    words = ["train", "--run-dir", str(tmp_path), "--train-iters", "2", "--lr-warmup-iters", "0"]
    assert main(words) == 2
    assert main([*words, "--overwrite"]) == 2
    assert main([*words, "--load", str(tmp_path / "typo")]) == 2
    assert files(tmp_path) == before
    assert capsys.readouterr().err.count("\n") == 3


# ---- locks ------------------------------------------------------------------------------------

HOLD = """
import sys, time
from pathlib import Path
from megatron_snip.directory import lock_directory
lock_directory(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def holding(directory: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


@pytest.fixture
def abandoned(tmp_path: Path) -> Path:
    """A directory whose lock is held by a process that has been killed."""
    process = holding(tmp_path)
    process.kill()
    process.wait()
    return tmp_path


def refusal(directory: Path) -> str:
    """Return why the lock is refused; an empty text if it is not, and then it is released."""
    try:
        lock_directory(directory)()
    except UsageError as error:
        return str(error)
    return ""


def test_the_second_writer_is_refused_with_the_holders_name(tmp_path: Path) -> None:
    process = holding(tmp_path)
    try:
        assert f"in use by process {process.pid} on host " in refusal(tmp_path)
    finally:
        process.kill()
        process.wait()
    release = lock_directory(tmp_path)  # its holder is dead
    release()
    release()
    assert files(tmp_path) == set()


def test_of_many_that_find_a_dead_holder_one_gets_the_lock(abandoned: Path) -> None:
    def take(_: int) -> bool:
        try:
            lock_directory(abandoned)
        except UsageError:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert sorted(threads.map(take, range(8))) == [False] * 7 + [True]


def test_who_ended_while_taking_over_is_not_waited_for_whatever_the_clock_says(
    abandoned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = (abandoned / LOCK).read_text()

    def end(self: Path, **_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", end)  # between the claim and the removal
        with pytest.raises(KeyboardInterrupt):
            lock_directory(abandoned)
    (claim,) = abandoned.glob("*.claim")
    assert "contended" in refusal(abandoned)  # this process lives
    claim.write_text(dead)
    os.utime(claim, (2**33, 2**33))
    lock_directory(abandoned)()
    assert not list(abandoned.glob("*.claim"))


def with_holder(directory: Path, **changes: Any) -> None:
    lock_directory(directory)
    held = json.loads((directory / LOCK).read_text())
    (directory / LOCK).write_text(json.dumps({**held, **changes}))


OTHER_HOST = {"host": "node7", "pid": 2**22 - 1, "job": "12", "restart": 0}


@pytest.mark.parametrize(
    ("holder", "job", "restarts", "gone"),
    [
        (OTHER_HOST, "", "", False),  # not presumed dead
        ({"boot": "another boot"}, "", "", True),
        ({"started": "1"}, "", "", True),  # its PID is another process now
        (OTHER_HOST, "12", "", False),
        (OTHER_HOST, "12", "x", False),
        (OTHER_HOST, "12", "1", True),  # a requeued job and its former attempt
        *(({**OTHER_HOST, "restart": bad}, "12", "2", False) for bad in (None, "x", [1])),
    ],
)
def test_only_a_holder_that_is_provably_gone_loses_the_lock(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    holder: dict[str, Any],
    job: str,
    restarts: str,
    gone: bool,
) -> None:
    with_holder(tmp_path, **holder)
    for name, value in (("SLURM_JOB_ID", job), ("SLURM_RESTART_COUNT", restarts)):
        if value:
            monkeypatch.setenv(name, value)
    text = refusal(tmp_path)
    assert text == "" if gone else "on host node7, Slurm job 12, since" in text


@pytest.mark.parametrize(
    ("answer", "gone"),
    [("COMPLETED", True), ("RUNNING", False), ("COMPLETED\nCOMPLETING", False), ("", True)],
)
def test_slurm_is_asked_whether_a_job_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, gone: bool
) -> None:
    squeue = tmp_path / "bin" / "squeue"
    fill(tmp_path, "bin/squeue")
    squeue.write_text(f"#!/bin/sh\nprintf '{answer}\\n'\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{squeue.parent}{os.pathsep}{os.environ['PATH']}")
    with_holder(tmp_path / "run", host="node7", job="12")
    text = refusal(tmp_path / "run")
    assert text == "" if gone else "Slurm job 12" in text


@pytest.mark.parametrize("content", ["", "[]", "{}", "[" * 5000, "\0", None])
def test_a_lock_that_cannot_be_read_is_respected(tmp_path: Path, content: str | None) -> None:
    if content is None:
        os.mkfifo(tmp_path / LOCK)
    else:
        (tmp_path / LOCK).write_text(content)
    assert "in use by another job (its lock cannot be read)" in refusal(tmp_path)

"""Files are complete or absent, and foreign files stay."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from unittest.mock import Mock

import pytest

from megatron_snip.directory import (
    check_new_run,
    clear_run,
    mark,
    mark_new_run,
    own_files,
    run_id,
)
from megatron_snip.errors import UsageError, known_failure
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


def test_a_file_has_the_mode_of_the_umask_which_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The umask is the process's: a thread that opens a file meanwhile would get another mode."""
    former = os.umask(0o027)
    try:
        monkeypatch.setattr(os, "umask", lambda _: pytest.fail("the umask was changed"))
        write_atomic(tmp_path / "file", "text")
    finally:
        monkeypatch.undo()
        os.umask(former)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


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
    clear_run(tmp_path, list(own_files(tmp_path)), archive=False)
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
    folders = ("plans", "tensorboard", "report", "data", "data_index", "wandb", ".wandb")
    for name in folders:
        (run / name).symlink_to(elsewhere)
    (run / "metrics.jsonl").symlink_to(elsewhere / "20.json")
    (run / "notes").symlink_to("n" * 300)  # even to ask whether it is a folder raises OSError
    assert list(own_files(run)) == []
    for name in sorted([*folders, "metrics.jsonl"]):
        kind = "folder" if name in folders else "regular file"
        with pytest.raises(UsageError, match=f"is no {kind}, and SNIP would read or write"):
            check_new_run(run, overwrite=True)
        (run / name).unlink()
    (run / "data" / "python-source-0").mkdir(parents=True)
    bad = [run / "config.yaml", run / "data" / "python-source-0" / "train.bin"]
    for path in (*bad, run / ".megatron-snip"):
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        with pytest.raises(UsageError, match=f"{path.name}' is no regular file"):
            check_new_run(run, overwrite=False)
        path.unlink()
    (run / "metrics.jsonl").mkdir()
    with pytest.raises(UsageError, match="is no regular file"):
        check_new_run(run, overwrite=True)
    with pytest.raises(UsageError, match="is no folder; name another directory"):
        check_new_run(elsewhere / "20.json", overwrite=True)


def test_a_link_to_nowhere_does_not_stop_the_move(tmp_path: Path) -> None:
    mark(tmp_path)
    fill(tmp_path, "config.yaml")
    (tmp_path / "previous-1").symlink_to("gone")
    assert clear_run(tmp_path, list(own_files(tmp_path)), True) == tmp_path / "previous-2"


@pytest.mark.parametrize("function", ["replace", "fsync"])
def test_a_file_that_cannot_be_written_is_named(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")  # as a write's: without a name

    monkeypatch.setattr(os, function, fail)
    with pytest.raises(OSError, match=r"Input/output error: .*/config\.yaml'") as caught:
        write_atomic(tmp_path / "config.yaml", "text")
    assert "the disk or the network file system has failed" in (known_failure(caught.value) or "")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_behind_another_error_is_named() -> None:
    """As Megatron raises when it cannot write its index of samples."""
    wrapped = RuntimeError("Failed to write dataset materials")
    wrapped.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    assert (known_failure(wrapped) or "").startswith("[Errno 28] No space left on device; ")


def test_an_earlier_attempt_is_moved_aside(tmp_path: Path) -> None:
    mark(tmp_path)
    assert clear_run(tmp_path, [], archive=True) is None
    for attempt in (1, 2):
        fill(tmp_path, *OWN, "plans/best.json")
        mark_new_run(tmp_path)
        moved = clear_run(tmp_path, list(own_files(tmp_path)), archive=True)
        assert moved == tmp_path / f"previous-{attempt}"
        assert run_id(moved) == run_id(tmp_path) != ""
        kept = files(tmp_path / f"previous-{attempt}")
        assert kept == {*OWN, ".megatron-snip"}
    assert (tmp_path / "plans" / "best.json").exists()

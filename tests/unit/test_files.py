import json
import os
import stat
from pathlib import Path

import pytest

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


def test_writing_replaces_the_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_atomic(path, "old")
    write_atomic(path, json.dumps({"new": 1}))
    assert read_json(path, "plan") == {"new": 1}
    assert os.listdir(tmp_path) == ["plan.json"]


def test_a_failed_write_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    write_atomic(path, "old")

    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["plan.json"]


def test_a_pipe_is_written_to_and_stays_one(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_atomic(path, "text")
        assert os.read(reader, 100) == b"text"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(path.stat().st_mode)


def test_a_pipe_that_nobody_reads_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(OSError, match="No such device or address"):
        write_atomic(path, "text")


def test_a_link_to_a_pipe_is_replaced(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "plan.json"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    write_atomic(link, "text")  # written to, the pipe would block: nobody reads it
    assert link.is_file() and not link.is_symlink()
    assert link.read_text() == "text"

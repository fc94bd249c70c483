import json
import os
import stat
from pathlib import Path
from unittest.mock import Mock

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

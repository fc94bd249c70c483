"""Files of arguments: words, comments, quotes."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_snip.argument_file import expand, line_words
from megatron_snip.errors import UsageError


def test_a_line_is_read_as_a_shell_reads_it() -> None:
    assert line_words("--lr 1e-4 --name 'two words'  # a comment") == [
        "--lr",
        "1e-4",
        "--name",
        "two words",
    ]
    assert line_words("# all of it") == line_words("") == []
    with pytest.raises(UsageError, match="a quote is not closed in 'say \"it'"):
        line_words(' say "it\n')


def test_files_stand_where_they_are_named(tmp_path: Path) -> None:
    one, two = tmp_path / "one.args", tmp_path / "two.args"
    one.write_text("# one\n--a 1\n\n--b\n")
    two.write_text("--a 2")
    assert expand(["x", f"@{one}", "--c", f"@{two}", "@"]) == [
        *["x", "--a", "1", "--b"],
        *["--c", "--a", "2", "@"],
    ]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the argument file '.*none\.args'"):
        expand([f"@{tmp_path / 'none.args'}"])

"""Files of command-line arguments: among the words, `@FILE` stands for the words in FILE.

    python -m megatron_snip pretrain_gpt.py @model.args @layout.args --lr 1e-4

A line holds any number of words, quoted as in a shell; `#` begins a comment. Later words win, as
they do on the command line. A file's words are taken as they are: `@` means nothing there.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from megatron_snip.errors import UsageError

PREFIX = "@"

MAX_BYTES = 1 << 20
"""1 MiB: hundreds of times the longest launch script."""


def line_words(line: str) -> list[str]:
    """Return the words of a line.

    Raises:
        UsageError: if a quote is not closed.
    """
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        raise UsageError(f"argument file: a quote is not closed in '{line.strip()}'") from None


def read_lines(path: Path) -> list[str]:
    """Return the lines of a file; a pipe will do.

    Raises:
        UsageError: if the file cannot be read, is longer than `MAX_BYTES`, or is not UTF-8.
    """
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise UsageError(f"the argument file '{path}' is larger than {MAX_BYTES >> 20} MiB")
        return data.decode("utf-8").splitlines()
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a NUL in the name
        raise UsageError(f"cannot read the argument file '{path}': {error}") from None


def read_argument_file(path: Path) -> list[str]:
    """Return the words of a file.

    Raises:
        UsageError: if the file cannot be read, or a line is no words.
    """
    return [word for line in read_lines(path) for word in line_words(line)]


def expand(words: Sequence[str]) -> list[str]:
    """Return `words` with every `@FILE` replaced by the words in FILE.

    Raises:
        UsageError: if a file cannot be read.
    """
    expanded = []
    for word in words:
        named = word.startswith(PREFIX) and len(word) > 1
        expanded += read_argument_file(Path(word[1:])) if named else [word]
    return expanded

"""Files of command-line arguments: among the words, `@FILE` stands for the words in FILE.

    python -m megatron_snip pretrain_gpt.py @model.args @layout.args --lr 1e-4

A line holds any number of words, quoted as in a shell; `#` begins a comment. Later words win, as
they do on the command line.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from megatron_snip.errors import UsageError

PREFIX = "@"


def line_words(line: str) -> list[str]:
    """Return the words of a line.

    Raises:
        UsageError: if a quote is not closed.
    """
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        raise UsageError(f"argument file: a quote is not closed in '{line.strip()}'") from None


def read_argument_file(path: Path) -> list[str]:
    """Return the words of a file.

    Raises:
        UsageError: if the file cannot be read, or a line is no words.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the argument file '{path}': {error}") from None
    return [word for line in text.splitlines() for word in line_words(line)]


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

"""Strict JSON in, atomic JSON out.

Reading refuses what JSON leaves open and a plan must not: NaN and Infinity, duplicate keys,
numbers that do not fit a double, nesting beyond sense; and files that are no regular ones or larger
than any of ours. Writing goes to a temporary file in the same directory, then
fsync, then rename, so that a reader sees the old file or the new one and never half of one.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
import tempfile
from pathlib import Path
from typing import Any, NoReturn

from megatron_snip.errors import UsageError

MAX_BYTES = 1 << 28
"""256 MiB: a problem of a million options is smaller."""


class _Refused(ValueError):
    """Content that plain JSON lets pass."""


def parse_json(text: str, source: str) -> Any:
    """Return the value of a JSON document.

    Args:
        text: the document.
        source: how error messages call it, e.g. `'runs/demo/plans/20.json'`.

    Raises:
        UsageError: if it is not JSON, or holds NaN, Infinity, a duplicate key or a number too
            large for a double.
    """
    try:
        return json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
            parse_int=_double_sized_int,
        )
    except _Refused as error:
        raise UsageError(f"{source}: {error}") from None
    except json.JSONDecodeError as error:
        raise UsageError(
            f"{source} is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    except RecursionError:
        raise UsageError(f"{source} is nested too deeply to be a plan or a problem") from None


def read_json(path: Path, what: str) -> Any:
    """Read a file with `parse_json`.

    Args:
        path: the file.
        what: what it should be, for error messages, e.g. `problem file`.

    Raises:
        UsageError: if the file cannot be read, is not UTF-8, or for `parse_json`'s reasons.
    """
    source = f"{what} '{path}'"
    return parse_json(read_text(path, source), source)


def read_text(path: Path, source: str) -> str:
    """Read a text file that may be anything.

    Args:
        path: the file.
        source: how error messages call it.

    Raises:
        UsageError: if it cannot be read, is a device or a pipe (which may never end), is larger
            than `MAX_BYTES`, or is not UTF-8.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"{source} is not a regular file")
        if status.st_size > MAX_BYTES:
            raise UsageError(f"{source} is larger than {MAX_BYTES >> 20} MiB")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{source} is not UTF-8 text") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read {source}: {reason}") from None


def write_atomic(path: Path, text: str) -> None:
    """Write `text` to `path` so that the file is never seen incomplete.

    A device or a pipe is written to, because a file in its place would take it from everyone; a
    symbolic link is replaced, and what it points to is left alone.

    Raises:
        OSError: if the directory is missing or not writable; nothing is left behind.
    """
    in_dev = path.absolute().parts[:2] == ("/", "dev")  # /dev/stdout is a link
    if path.exists() and (in_dev or not (path.is_file() or path.is_symlink())):
        path.write_text(text, encoding="utf-8")
        return
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        # mkstemp makes the file private; a plan is as readable as any file its owner writes.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    """Make the rename durable, where the file system lets a directory be opened."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Refused(f"duplicate key '{key}'")
            seen.add(key)
    return table


def _refuse_constant(name: str) -> NoReturn:
    raise _Refused(f"{name} is not a JSON number; write null for a forbidden option")


def _finite_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise _Refused(f"the number {text} does not fit a double")
    return value


def _double_sized_int(text: str) -> int:
    if len(text) > 300:
        raise _Refused(f"an integer of {len(text)} digits does not fit a double")
    return int(text)

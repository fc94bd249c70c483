"""Whose error it is that ends a script before its model is built: the user's, or one of the code.

Megatron refuses settings by exceptions of any type, so the type does not tell.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from megatron_snip.errors import SnipError, UsageError, one_line
from megatron_snip.plugins import is_of_plugin

_THEIRS = {"__main__", "megatron", "transformer_engine"}
"""The script, and the packages whose code builds its model."""


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Within the block an error of Megatron's or of the script is a refusal.

    An error in code of this package, or of a plugin, stays what it is, as does a failed import.

    Args:
        what: who refuses what.

    Raises:
        UsageError: one line.
    """
    try:
        yield
    except (SnipError, ImportError):
        raise
    except Exception as error:
        if _is_ours(error):
            raise
        raise UsageError(f"{what}: {_reason(error)}") from error


def _is_ours(error: Exception) -> bool:
    """Return whether the last code that ran, without that of libraries, was ours or a plugin's."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        package = _package(frame)
        # All functions of torch pass through ours while a model is built.
        if package == "megatron_snip" and frame.f_code.co_name != "__torch_function__":
            return True
        if is_of_plugin(package):
            return True
        if package in _THEIRS:
            return False
    return False


def _reason(error: Exception) -> str:
    """Return what an error says, in one line; what is no plain refusal, with its place."""
    frames = list(traceback.walk_tb(error.__traceback__))
    # A bare assertion says nothing.
    text = one_line(error) or traceback.extract_tb(error.__traceback__)[-1].line
    if isinstance(error, AssertionError | ValueError) and text:
        return text
    of_theirs = [(f, line) for f, line in frames if _package(f) in _THEIRS] or frames
    frame, line = of_theirs[-1]
    return f"{type(error).__name__}: {text} ({frame.f_code.co_filename}:{line})"


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]

"""`megatron-snip COMMAND ...`, or a Megatron-LM script: `python -m megatron_snip SCRIPT ...`.

The first word decides: a subcommand's name, or a script (after `--cpu`, always a script).
"""

import contextlib
import io
import os
import sys
import traceback
from collections.abc import Sequence

from megatron_snip.cli.commands import COMMANDS, run_command, split_plugins
from megatron_snip.cli.script import is_script, prepare_script, run_script
from megatron_snip.errors import (
    SnipError,
    UnsupportedError,
    UsageError,
    known_failure,
    one_line,
    shown,
)
from megatron_snip.plugins import load_plugins, place_in_plugin


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand, or a script; return its exit status.

    Bad input is one line and status 2. Other failures, of files for example (a full disk, a closed
    stdout), are one line and status 1. After the line of an error in this package or in a plugin
    comes its traceback.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        plugins, words = split_plugins(words)
        load_plugins(plugins)
        if not words or words[0] in COMMANDS or not is_script(words):
            return _run_and_flush(words)
        script = prepare_script(words)
    except (UsageError, UnsupportedError) as error:
        print(f"megatron-snip: error: {shown(error)}", file=sys.stderr)
        return 2
    except SnipError as error:
        # Where it stands for another error, that one is in the log with its traceback.
        print(f"megatron-snip: {shown(error)}{_in_plugin(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("megatron-snip: ended by SIGINT", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our stdout has gone (| head)
        _drop_stdout()
        return 141
    except Exception as error:
        _print_failure(error)
        if isinstance(error, OSError):
            _drop_stdout()
        return 1
    return run_script(script)  # its errors are its own


def _print_failure(error: Exception) -> None:
    """Print one line; of an error of the code, and not of the machine, the traceback as well."""
    reason = known_failure(error)
    in_plugin = _in_plugin(error)
    has_bug = in_plugin != ""
    if reason is None and isinstance(error, OSError):
        reason = str(error)
    elif reason is None:
        has_bug = True
        reason = f"{type(error).__name__}: {one_line(error)}"
        if not in_plugin:
            reason += "; this is a bug of megatron-snip: report it with the traceback below"
    print(f"megatron-snip: {shown(reason)}{in_plugin}", file=sys.stderr)
    if has_bug:
        traceback.print_exception(error)


def _in_plugin(error: Exception) -> str:
    place = place_in_plugin(error)
    return "" if place is None else f" (in a plugin: {shown(place)})"


def _run_and_flush(words: Sequence[str]) -> int:
    if sys.stdout is None:  # closed (>&-): nothing could be printed
        raise OSError("standard output is closed; give it a file, or /dev/null")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name may not fit its encoding
    try:
        return run_command(words)
    finally:
        sys.stdout.flush()


def _drop_stdout() -> None:
    """Let the interpreter's own flush at exit succeed."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # no stdout, or a test's
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())

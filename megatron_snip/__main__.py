"""`megatron-snip COMMAND ...`, or a Megatron-LM script: `python -m megatron_snip SCRIPT ...`.

The first word decides: a subcommand's name, or a script (after `--cpu`, always a script).
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_snip.argument_file import read_lines
from megatron_snip.cli.command import COMMANDS
from megatron_snip.cli.script import is_script, prepare_script, run_script
from megatron_snip.errors import SnipError, UsageError, shown
from megatron_snip.version import __version__

EPILOG = """\
examples:
  megatron-snip train --config configs/demo.yaml
  megatron-snip plan runs/demo/problems/20.json --target 0.9
  megatron-snip doctor
  torchrun ... -m megatron_snip pretrain_gpt.py ARGS --snip --snip-efficiency-target 0.75
  torchrun ... -m megatron_snip --cpu pretrain_gpt.py ARGS --snip
"""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> None:  # type: ignore[override]
        """Raise instead of printing the usage and exiting, so that all errors look alike."""
        raise UsageError(f"{message} (see '{self.prog} --help')")

    def _read_args_from_files(self, arg_strings: list[str]) -> list[str]:
        """Expand `@FILE` where a command takes it.

        Argparse would read anything, and files in files without end.
        """
        words: list[str] = []
        for word in arg_strings:
            if word and word[0] in (self.fromfile_prefix_chars or ""):
                for line in read_lines(Path(word[1:])):
                    words += self.convert_arg_line_to_args(line)
            else:
                words.append(word)
        return words

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print; argparse's own hides that it could not."""
        (file or sys.stderr).write(message)


def build_parser(chosen: str | None) -> argparse.ArgumentParser:
    """Return the parser; only the subcommand called `chosen` gets its arguments."""
    parser = _Parser(
        prog="megatron-snip",
        description="SNIP: adaptive per-linear precision for LLM pretraining with Megatron.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=_Parser
    )
    for command in COMMANDS.values():
        sub = subparsers.add_parser(
            command.name, help=command.help, description=command.help, allow_abbrev=False
        )
        if command.name == chosen:
            command.load().add_arguments(sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand, or a script; return its exit status.

    Bad input is one line and status 2; what else fails as files do (a full disk, a closed stdout)
    is one line and status 1.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if not words or words[0] in COMMANDS or not is_script(words):
            return _to_the_end(words)
        script = prepare_script(words)
    except UsageError as error:
        print(f"megatron-snip: error: {shown(error)}", file=sys.stderr)
        return 2
    except SnipError as error:
        print(f"megatron-snip: {shown(error)}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of our stdout has gone (| head)
        _drop_stdout()
        return 141
    except OSError as error:
        print(f"megatron-snip: {shown(error)}", file=sys.stderr)
        _drop_stdout()
        return 1
    return run_script(script)  # its errors are its own


def run_command(words: Sequence[str]) -> int:
    """Run one subcommand; return its exit status.

    Raises:
        SnipError: as the subcommand does.
    """
    chosen = next((word for word in words if word in COMMANDS), None)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    args = build_parser(chosen).parse_args(words)
    return COMMANDS[args.command].load().run(args)


def _to_the_end(words: Sequence[str]) -> int:
    """Run one subcommand, until what it has printed is where it belongs.

    Raises:
        SnipError: as the subcommand does.
        OSError: if it cannot be printed.
    """
    if sys.stdout is None:  # closed (>&-): every print would be lost without a word
        raise OSError("standard output is closed; give it a file, or /dev/null")
    try:
        return run_command(words)
    finally:
        sys.stdout.flush()


def _drop_stdout() -> None:
    """Let the interpreter's own flush at exit, of what could not be printed, succeed."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # none, or a test's
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())

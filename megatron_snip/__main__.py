"""`megatron-snip COMMAND ...`, or a Megatron-LM script: `python -m megatron_snip SCRIPT ...`.

The first word decides: a subcommand's name, or a script (after `--cpu`, always a script).
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from megatron_snip.cli.command import COMMANDS
from megatron_snip.cli.script import is_script, prepare_script, run_script
from megatron_snip.errors import SnipError, UsageError
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
    """Run one subcommand, or a script; return the exit status (2 on bad input, with one line)."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if not words or words[0] in COMMANDS or not is_script(words):
            return run_command(words)
        script = prepare_script(words)
    except UsageError as error:
        print(f"megatron-snip: error: {error}", file=sys.stderr)
        return 2
    except SnipError as error:
        print(f"megatron-snip: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of our stdout has gone (| head)
        return 141
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


if __name__ == "__main__":
    sys.exit(main())

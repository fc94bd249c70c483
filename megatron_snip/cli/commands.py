"""The subcommands of `megatron-snip`, and the parser of their flags.

A subcommand is a module with two functions: `add_arguments(parser)` adds its flags, `run(args)`
does the work and returns the exit status. Its `EXAMPLES`, where it has some, end its help. Only the
module of the given command is imported, so `megatron-snip plan` never imports torch.
"""

import argparse
import contextlib
import importlib
import logging
import re
import sys
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_snip.directory import MARKER, check_plain
from megatron_snip.errors import UsageError, did_you_mean
from megatron_snip.files import read_yaml
from megatron_snip.plugins import loaded_plugins
from megatron_snip.version import __version__

COMMANDS: dict[str, str] = {
    "train": "train a Llama-style GPT with SNIP",
    "plan": "make a plan from a problem file",
    "pareto": "quality loss against efficiency",
    "score": "judge plans, precision files, policies and rules by what a run measured",
    "diff": "what changed between two plans, and why",
    "report": "a run as an HTML page",
    "stats": "what a refresh measured, as a table",
    "calibrate": "measure seconds per GEMM and format",
    "export": "a plan for Megatron without SNIP, torchtitan, ModelOpt, or as YAML",
    "import": "a plan from Megatron's precision file",
    "schema": "the JSON Schema of a file that SNIP writes",
    "preflight": "what SNIP would do with a job: without its GPUs, before it is queued",
    "doctor": "what this machine can run, and which command line to use",
}
"""Every subcommand with its help, in the order of --help."""

PLUGINS_FLAG = "--plugins"

EPILOG = """\
examples:
  megatron-snip train --config configs/demo.yaml
  megatron-snip plan runs/demo/problems/21.json --target 0.9
  megatron-snip doctor
  torchrun ... -m megatron_snip pretrain_gpt.py ARGS --snip --snip-efficiency-target 0.75
  torchrun ... -m megatron_snip --cpu pretrain_gpt.py ARGS --snip
"""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line and name the flag that was probably meant."""

    def __init__(self, **settings: Any) -> None:
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(allow_abbrev=False, formatter_class=form, **settings)

    def error(self, message: str) -> None:  # type: ignore[override]
        """Raise instead of printing the usage and exiting."""
        raise UsageError(f"{message}; see '{self.prog} --help'")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown flags before argparse asks for those that are missing."""
        known = self._option_string_actions
        takes_rest = any(action.nargs == argparse.REMAINDER for action in self._actions)
        words = iter(args or ())
        for word in words:
            is_positional = not word.startswith("-")
            if word == "--" or (is_positional and (self._subparsers is not None or takes_rest)):
                break
            if takes_rest and word in known and known[word].nargs is None:
                next(words, None)  # its value
            flag = word.partition("=")[0]
            if flag.startswith("--") and " " not in flag and flag not in known:
                hint = did_you_mean(flag, known)
                raise UsageError(f"unknown flag '{flag}'{hint}; see '{self.prog} --help'")
        found, rest = super().parse_known_args(args, namespace)
        if rest and self._subparsers is None:  # argparse itself would refer to the help of all
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return found, rest

    def _print_message(self, message: str, file: Any = None) -> None:
        (file or sys.stderr).write(message)  # argparse's own hides that it could not


def load(name: str) -> ModuleType:
    """Import the module of a subcommand."""
    return importlib.import_module(f"megatron_snip.cli.{'import_' if name == 'import' else name}")


def build_parser(chosen: str | None) -> argparse.ArgumentParser:
    """Return the parser; only the subcommand called `chosen` gets its flags."""
    parser = Parser(
        prog="megatron-snip",
        description="SNIP: adaptive per-linear precision for LLM pretraining with Megatron.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    text = "modules that add policies, formats or writers"
    # For the help alone: `split_plugins` has taken it off the command line.
    parser.add_argument(PLUGINS_FLAG, metavar="A,B,...", help=text)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, text in COMMANDS.items():
        sub = subparsers.add_parser(name, help=text, description=text)
        if name == chosen:
            module = load(name)
            module.add_arguments(sub)
            if examples := getattr(module, "EXAMPLES", ()):
                sub.epilog = "\n".join(["examples:", *(f"  {line}" for line in examples)])
    return parser


def split_plugins(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the modules that `--plugins A,B` names, and the words without it.

    They are imported before a command's flags are known: a policy of theirs may be among these. The
    flag may stand anywhere among the words of a command. Words after a script are the script's.
    """
    plugins: list[str] = []
    others: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        flag, is_joined, names = word.partition("=")
        is_of_command = not others or others[0] in COMMANDS
        if others[:1] == ["preflight"]:
            is_value = len(others) > 1 and others[-1] in ("--gpus", "--capability")
            is_of_command = word.startswith("-") or is_value
        if word == "--" or not is_of_command:
            return plugins, [*others, word, *left]
        if flag != PLUGINS_FLAG:
            others.append(word)
            continue
        if not is_joined and left:
            names = left.pop(0)
        plugins += [name.strip() for name in names.split(",") if name.strip()]
    return plugins, others


def run_command(words: Sequence[str]) -> int:
    """Run one subcommand; return its exit status.

    Raises:
        SnipError: as the subcommand does.
    """
    name = words[0] if words else ""
    if name and not name.startswith("-") and name not in COMMANDS:
        commands = ", ".join(COMMANDS)
        raise UsageError(
            f"unknown command '{name}'{did_you_mean(name, COMMANDS)}; commands are {commands}"
        )
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    # On import Megatron logs and warns about each optional package that is missing.
    logging.getLogger("megatron").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"megatron\.")
    args = build_parser(name).parse_args(words)
    try:
        return int(load(args.command).run(args))
    except UsageError as error:
        if not re.search("unknown (format|option|policy)", str(error)):
            raise
        missing = plugins_of_runs(vars(args).values())
        if not missing:
            raise
        names = ",".join(missing)
        text = f"{error.message}; the run has plugins that are not loaded: add --plugins {names}"
        raise UsageError(text, error.field) from None


def plugins_of_runs(given: Iterable[object]) -> list[str]:
    """Return the plugins that runs had and this process has not, by the runs' files and folders."""
    missing: dict[str, None] = {}
    for path in given:
        if not isinstance(path, Path):
            continue
        for directory in (path, *path.absolute().parents[:2]):
            with contextlib.suppress(UsageError, OSError):
                if not (directory / MARKER).is_file():
                    continue
                check_plain(directory)
                snip = read_yaml(directory / "config.yaml").get("snip")
                names = snip.get("plugins") if isinstance(snip, dict) else None
                missing |= dict.fromkeys(map(str, names if isinstance(names, list) else ()))
    return [name for name in missing if name not in loaded_plugins()]

"""Prints docs/flags.md, made from the parsers of the command line.

    python docs/flags_page.py            print the page
    python docs/flags_page.py --write    write docs/flags.md

Settings come from `SnipConfig` and `TrainFields`, whose field docstrings are the help. The flags of
a subcommand come from its module.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from megatron_snip.cli.commands import COMMANDS, build_parser
from megatron_snip.config import SnipConfig
from megatron_snip.flags import add_flags
from megatron_snip.patches.arguments import add_snip_arguments

PAGE = Path(__file__).with_name("flags.md")
COMMAND = "python docs/flags_page.py --write"
HEAD = f"""\
# Flags

<!-- Written by `{COMMAND}`; a test compares the two. -->

A setting of SNIP has the same name everywhere: `efficiency_target` in YAML and Python is
`--snip-efficiency-target` on the command line. (The flag of `enabled` is `--snip`.) Flags override
YAML. An unknown key or flag is an error.
"""
SCRIPT = """\
## Megatron scripts

`python -m megatron_snip SCRIPT ARGS` accepts Megatron's flags, the settings above, and these flags.
`--cpu` before the script's name runs it without GPUs. There `--async-save` is ignored.
"""
TRAIN = """\
## megatron-snip train

The keys of `--config FILE` are the flags with underscores; SNIP's settings are below `snip:`. Flags
of the model, the parallel layout and training have Megatron's names: `megatron-snip train --help`
has them, with their defaults.
"""
OF_MEGATRON = ("The model", "Parallel layout", "Training")
"""How the titles of groups begin whose flags are Megatron's; their help is enough."""
SHARED = ("constraints", "solver", "pipeline")
"""Groups of several subcommands."""
TABLE_HEAD = ["| flag | value | default | meaning |", "| --- | --- | --- | --- |"]


def page() -> str:
    """Return the page's text."""
    parts = [HEAD, "## SNIP's settings\n", *_groups(_snip())]
    parts += [SCRIPT, *_groups(_script_only())]
    shown: dict[str, tuple[str, list[str]]] = {}
    for name, text in COMMANDS.items():
        head = TRAIN if name == "train" else f"## megatron-snip {name}\n"
        parts += [head, f"{text[0].upper()}{text[1:]}.\n", _command(name, shown)]
    return "\n".join(part.rstrip() + "\n" for part in parts)


def _snip() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser, SnipConfig, "snip-")
    return parser


def _flags_of(parser: argparse.ArgumentParser) -> frozenset[str]:
    return frozenset(flag for action in parser._actions for flag in action.option_strings)


def _script_only() -> argparse.ArgumentParser:
    """What Megatron scripts take that is no field of SnipConfig."""
    parser = argparse.ArgumentParser(add_help=False)
    add_snip_arguments(parser)
    known = _flags_of(_snip())
    for group in parser._action_groups:
        group._group_actions = [a for a in group._group_actions if not known & {*a.option_strings}]
    return parser


def _parser_of(name: str) -> argparse.ArgumentParser:
    choices = next(a.choices for a in build_parser(name)._actions if a.dest == "command")
    assert isinstance(choices, dict)
    found = choices[name]
    assert isinstance(found, argparse.ArgumentParser)
    return found


def _groups(parser: argparse.ArgumentParser) -> Iterator[str]:
    """One table a group of flags."""
    for group in parser._action_groups:
        rows = [row for action in group._group_actions for row in _rows(action)]
        if rows:
            title = group.title or "Flags"
            lines = [*TABLE_HEAD, *rows]
            yield f"### {title[0].upper()}{title[1:]}\n\n" + "\n".join(lines) + "\n"


def _command(name: str, shown: dict[str, tuple[str, list[str]]]) -> str:
    """Return one table for a subcommand; of groups that another one has shown, only the flags.

    `shown` has the command and the rows of each group by its title, and gets those of this one.
    """
    rows: list[str] = []
    again = ""
    known = _flags_of(_snip())
    for group in _parser_of(name)._action_groups:
        title = group.title or ""
        found = [row for action in group._group_actions for row in _rows(action, known)]
        if not found or (name == "train" and title.startswith(OF_MEGATRON)):
            continue
        first, before = shown.setdefault(title, (name, found))
        if first != name and before == found and title.lower() in SHARED:
            flags = re.findall(r"^\| (`--[\w-]+`)", "\n".join(found), re.MULTILINE)
            again += f"As in [{first}](#megatron-snip-{first}): {', '.join(flags)}.\n"
        else:
            rows += found
    return "\n".join([*TABLE_HEAD, *rows, "", again])


def _rows(action: argparse.Action, leave_out: frozenset[str] = frozenset()) -> Iterable[str]:
    flags = action.option_strings
    if action.help is argparse.SUPPRESS or isinstance(action, argparse._HelpAction):
        return
    if leave_out.intersection(flags):
        return
    text = (action.help or "").replace("%%", "%")
    text, default = _default(text)
    value = "" if action.nargs == 0 else _value(action)
    name = ", ".join(f"`{flag}`" for flag in flags) or f"`{value}`"
    shown = f"`{value}`" if value and flags else ""
    yield f"| {name} | {_cell(shown)} | {_cell(default)} | {_cell(text)} |"


def _value(action: argparse.Action) -> str:
    if action.choices is not None and action.metavar is None:
        return ",".join(map(str, action.choices))
    metavar = action.metavar or action.dest.upper()
    return metavar if isinstance(metavar, str) else " ".join(metavar)


def _default(text: str) -> tuple[str, str]:
    """Part `meaning [default: x]` or `meaning [x]`."""
    match = re.fullmatch(r"(?s)(.*?)\s*\[(?:default: )?([^\[\]]*)\]", text)
    return (match[1], match[2]) if match else (text, "")


def _cell(text: str) -> str:
    """Escape what a table, HTML or emphasis would take for its own, outside of code."""
    text = " ".join(text.split()).replace("|", "\\|")
    parts = text.split("`")
    parts[::2] = [re.sub(r"([*_])", r"\\\1", p).replace("<", "&lt;") for p in parts[::2]]
    return "`".join(parts)


def main() -> None:
    """Print or write the page."""
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page(), encoding="utf-8")
    elif sys.argv[1:]:
        sys.exit(f"usage: python {sys.argv[0]} [--write]")
    else:
        sys.stdout.write(page())


if __name__ == "__main__":
    main()

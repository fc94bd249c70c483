"""The argument parser: `--snip-*` beside Megatron's own flags.

Megatron may parse several times in one process (fault tolerance and in-process restart do), each
time with a parser of its own; nothing is remembered here. The flags leave nothing in the namespace
unless they are given.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron_snip.config import SnipConfig
from megatron_snip.flags import add_flags
from megatron_snip.patches import cpu
from megatron_snip.patches.cpu_defaults import set_cpu_defaults
from megatron_snip.patches.seam import Function, Seam, wrapping
from megatron_snip.patches.session import Session
from megatron_snip.patches.target import Target

PREFIX = "snip-"
DEST = "snip_"
"""Put before every flag, and before every attribute of the namespace."""


def add_snip_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every flag of SNIP's that a Megatron script takes."""
    group = parser.add_argument_group("SNIP: adaptive precision (megatron_snip)")
    group.add_argument(
        f"--{PREFIX}config",
        dest=f"{DEST}config",
        metavar="FILE",
        type=Path,
        default=argparse.SUPPRESS,
        help="YAML file with settings by name (efficiency_target: 0.75); flags win",
    )
    group.add_argument(
        f"--{PREFIX}plan",
        dest=f"{DEST}plan_file",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help=f"short for --{PREFIX}plan-file",
    )
    group.add_argument(
        f"--{PREFIX}strict-version",
        dest=f"{DEST}strict_version",
        action="store_true",
        default=argparse.SUPPRESS,
        help="refuse releases of megatron-core that were not tested, instead of warning",
    )
    add_flags(parser, SnipConfig, PREFIX, DEST)


def _mend_help(parser: argparse.ArgumentParser) -> None:
    """Escape stray percent signs: with one of them in Megatron's texts (0.19) --help fails."""
    formatter = parser._get_formatter()
    for action in parser._actions:
        if action.help and action.help is not argparse.SUPPRESS:
            try:
                formatter._expand_help(action)
            except (ValueError, TypeError, KeyError):
                action.help = action.help.replace("%", "%%")


def _wrap(original: Function, session: Session) -> Function:
    @wrapping(original)
    def add_megatron_arguments(*args: Any, **kwargs: Any) -> Any:
        parser = original(*args, **kwargs)
        add_snip_arguments(parser)
        _mend_help(parser)
        if cpu.is_installed():
            set_cpu_defaults(parser)
        return parser

    return add_megatron_arguments


SEAM = Seam(
    name="arguments",
    purpose="adds the --snip-* flags",
    target=Target("megatron.training.arguments", "add_megatron_arguments", ("parser",)),
    wrap=_wrap,
    when="always",
)

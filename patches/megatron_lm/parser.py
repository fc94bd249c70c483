"""SNIP's flags in Megatron-LM's parser, so that `--help` lists them."""

import argparse
from typing import Any

from megatron_snip.patches import cpu
from megatron_snip.patches.arguments import add_snip_arguments
from megatron_snip.patches.cpu.megatron import set_cpu_defaults
from megatron_snip.patches.registry import Call, Session, patch


@patch("megatron.training.arguments", "add_megatron_arguments", needs=("parser",), when="always")
def arguments(call: Call, session: Session) -> Any:
    """Add SNIP's flags; under `--cpu` also set the defaults of a run without GPUs."""
    parser = call.run()
    session.found_megatron = True
    add_snip_arguments(parser)
    _escape_percent_signs(parser)
    if cpu.is_installed():
        set_cpu_defaults(parser)
    return parser


def _escape_percent_signs(parser: argparse.ArgumentParser) -> None:
    """Make `--help` work in spite of a stray percent sign in one of Megatron's texts (0.19)."""
    formatter = parser._get_formatter()
    for action in parser._actions:
        if action.help and action.help is not argparse.SUPPRESS:
            try:
                formatter._expand_help(action)
            except (ValueError, TypeError, KeyError):
                action.help = action.help.replace("%", "%%")

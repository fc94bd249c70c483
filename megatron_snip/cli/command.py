"""What a subcommand is, and the table of all of them.

A subcommand's module is imported only when its name is on the command line (or for --help of
that name), so that `megatron-snip plan` never imports torch.
"""

from __future__ import annotations

import argparse
import importlib
from dataclasses import dataclass
from typing import Protocol


class CommandModule(Protocol):
    """The two functions that a subcommand's module defines."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the subcommand's flags and positionals to `parser`."""

    def run(self, args: argparse.Namespace) -> int:
        """Do the work; return the exit status. Raise `UsageError` for bad input (status 2)."""


@dataclass(frozen=True)
class Command:
    """A subcommand: its name, the one-line help, and the module that implements it."""

    name: str
    help: str
    module: str

    def load(self) -> CommandModule:
        """Import and return the module that implements the subcommand."""
        module: CommandModule = importlib.import_module(self.module)
        return module


COMMANDS: dict[str, Command] = {
    c.name: c
    for c in (
        Command("train", "train a Llama-style GPT with SNIP", "megatron_snip.cli.train"),
        Command("plan", "make a plan from a problem file", "megatron_snip.cli.plan"),
        Command("pareto", "quality loss against efficiency", "megatron_snip.cli.pareto"),
        Command("report", "a run, or several compared, as a page", "megatron_snip.cli.report"),
        Command("stats", "what a refresh measured, as a table", "megatron_snip.cli.stats"),
        Command("calibrate", "measure seconds per GEMM and format", "megatron_snip.cli.calibrate"),
        Command("compare", "train under every policy, one table", "megatron_snip.cli.compare"),
        Command("export", "a plan as Megatron's precision file", "megatron_snip.cli.export"),
        Command("import", "a plan from Megatron's precision file", "megatron_snip.cli.import_"),
        Command("doctor", "what this machine can run, and why", "megatron_snip.cli.doctor"),
    )
}
"""Every subcommand by name, in the order of --help."""

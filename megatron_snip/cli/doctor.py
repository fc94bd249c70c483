"""`megatron-snip doctor`: what this machine can run, and the command line to use on it.

Every package is imported, so that an installation that is broken shows its error. A child process
imports them, since a library of a package may end the process that loads it.
"""

import argparse
import importlib
import json
import logging
import os
from collections.abc import Sequence
from importlib.util import find_spec

from megatron_snip.cli.common import new_table
from megatron_snip.errors import exit_text, one_line
from megatron_snip.output import console
from megatron_snip.version import versions

MODULES = {
    "numpy": "numpy",
    "torch": "torch",
    "megatron-core": "megatron.core",
    "ortools": "ortools.sat.python.cp_model",
    "transformer-engine": "transformer_engine.pytorch",
    "wandb": "wandb",
}
"""What is imported of each package. Order matters: some of the later ones import earlier ones."""

NEEDED = ("numpy", "torch", "megatron-core", "ortools")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument(
        "--changes",
        action="store_true",
        help="list what SNIP replaces in Megatron, Transformer Engine, torch and Python: why, the "
        "upstream issue, and when the entry can go",
    )


def run(args: argparse.Namespace) -> int:
    """Print what was found; return 0, or 1 if a package that SNIP needs cannot be imported."""
    # The table shows an import that fails. What imports log beside that is left out.
    for name in ("megatron", "torch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    out = console()
    version_of = versions()
    errors = import_errors([name for name in version_of if name in MODULES])
    table = new_table(("", "found"))
    for name, version in version_of.items():
        error = errors.get(name)
        suffix = f"; cannot be imported: {error}" if error else ""
        table.add_row(name, (version or "not installed") + suffix)
    out.print(table)
    missing = [name for name in NEEDED if errors.get(name) is not None]
    if missing:
        # A broken Transformer Engine, which SNIP does not need, breaks Megatron's import.
        broken = ", ".join(name for name, error in errors.items() if error)
        advice = f"repair or remove what is broken ({broken})" if broken else "install that first"
        out.print(f"SNIP needs {', '.join(missing)}: {advice}", soft_wrap=True)
        return 1
    from megatron_snip.cli import machine  # it imports torch

    if args.changes:
        machine.show_changes(out)
    else:
        machine.show(out)
    return 0


def import_errors(packages: Sequence[str]) -> dict[str, str | None]:
    """Return `import_error` of each package; child processes import them."""
    errors: dict[str, str | None] = {}
    while len(errors) < len(packages):
        left = packages[len(errors) :]
        lines, status = _in_child(left)
        errors |= dict(zip(left, map(json.loads, lines), strict=False))
        if len(lines) < len(left):
            errors[left[len(lines)]] = f"its import ends the process ({status})"
    return errors


def _in_child(packages: Sequence[str]) -> tuple[list[str], str]:
    """Import packages in a child; return a line of JSON for each, and how the child ended."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            for name in packages:
                line = json.dumps(import_error(MODULES[name])) + "\n"
                os.write(writer, line.encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, encoding="utf-8") as lines:
        answers = lines.read().splitlines()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return answers, exit_text(code)


def import_error(module: str) -> str | None:
    """Return why a module cannot be imported, '' if it is not installed, or None if it can."""
    try:
        if find_spec(module.partition(".")[0]) is None:
            return ""
        importlib.import_module(module)
    except (Exception, SystemExit) as error:  # whatever its import does
        return f"{type(error).__name__}: {one_line(error)}"
    return None

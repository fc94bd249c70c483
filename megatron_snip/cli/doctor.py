"""`megatron-snip doctor`: what this machine can run, and why.

Three questions: which versions are installed, which devices there are, and how each number format
runs here under each backend (this machine's column of docs/backends.md, with what its own
Transformer Engine says). `--patches` adds every function of Megatron's that SNIP needs: whether it
exists, has the parameters that SNIP passes, and belongs to a release that was tested.
"""

from __future__ import annotations

import argparse
import os

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from megatron_snip.cli.plan_tables import plain_console
from megatron_snip.errors import SnipError
from megatron_snip.formats import FORMATS
from megatron_snip.reporting.run_directory import versions
from megatron_snip.version import __version__


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument(
        "--patches",
        action="store_true",
        help="also list the functions of Megatron's that SNIP needs, with their state",
    )


def run(args: argparse.Namespace) -> int:
    """Print what was found; return 0, or 1 if `--patches` finds a function that SNIP cannot use."""
    console = plain_console(200)
    _print_versions(console)
    _print_devices(console)
    _print_formats(console)
    if not args.patches:
        return 0
    return _print_patches(console)


def _print_versions(console: Console) -> None:
    table = _table("", "version")
    for name, version in {**versions(), "megatron-snip": __version__}.items():
        table.add_row(name, version or "not installed")
    console.print(table)


def _print_devices(console: Console) -> None:
    import torch

    cores = len(os.sched_getaffinity(0))
    table = _table("device", "")
    table.add_row("cpu", f"{cores} cores for this process, {torch.get_num_threads()} threads")
    if not torch.cuda.is_available():
        why = "this torch was built without CUDA" if torch.version.cuda is None else "no driver"
        table.add_row("cuda", f"not available: {why}; python -m megatron_snip --cpu SCRIPT")
    else:
        for index in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_properties(index)
            gib = found.total_memory / 2**30
            capability = f"compute capability {found.major}.{found.minor}"
            table.add_row(f"cuda:{index}", f"{found.name}, {capability}, {gib:.0f} GiB")
    console.print(table)


def _print_formats(console: Console) -> None:
    import torch

    from megatron_snip.kernels import launch
    from megatron_snip.linears.availability import Backend, support, this_machine

    machine = this_machine(with_te=True)
    console.print(f"How GEMMs run here ({machine}), by --snip-backend; see docs/backends.md")
    table = _table("format", "bits", *Backend, "under te")
    for fmt in FORMATS.values():
        entries = [support(backend, fmt.name, machine) for backend in Backend]
        modes = (entry.mode for entry in entries)
        table.add_row(fmt.name, str(fmt.bits), *modes, entries[-1].reason)
    console.print(table)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    choice = launch.choose(device, (1, 128))
    console.print(f"simulate quantizes by {choice.path} ({choice.reason})")


def _print_patches(console: Console) -> int:
    from megatron_snip.patches.install import REGISTRY
    from megatron_snip.patches.registry import TESTED, core_version, is_tested

    try:
        version = core_version()
        tested = "tested" if is_tested(version) else "not tested"
        console.print(f"megatron-core {version} ({tested}, tested are {TESTED})")
    except SnipError as error:
        console.print(str(error))
    table = _table("patch", "for", "state", "what SNIP does there, and the function")
    states = {patch: REGISTRY.status(patch) for patch in REGISTRY.patches}
    for patch, status in states.items():
        table.add_row(patch.name, patch.when, status.state, f"{patch.purpose}\n{patch.target}")
    console.print(table)
    for detail in dict.fromkeys(s.detail for s in states.values() if s.detail):
        console.print(detail)
    return int(any(s.state in ("unusable", "overwritten") for s in states.values()))


def _table(*columns: str) -> RichTable:
    table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table

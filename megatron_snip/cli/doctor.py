"""`megatron-snip doctor`: what this machine can run, and why.

Three questions: which versions are installed, which devices there are, and how each number format
runs here under each backend (this machine's column of docs/backends.md, with what its own
Transformer Engine says). `--patches` adds every function of Megatron's that SNIP needs: whether it
exists, has the parameters that SNIP passes, and belongs to a release that was tested.
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from megatron_snip.cli.plan_tables import plain_console
from megatron_snip.errors import SnipError
from megatron_snip.formats import FORMATS
from megatron_snip.reporting.run_directory import versions
from megatron_snip.types import Gemm
from megatron_snip.version import __version__

if TYPE_CHECKING:
    from megatron_snip.linears.backends import Backend, Machine


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


def how(backend: Backend, fmt: str, machine: Machine) -> str:
    """Return how a format's GEMMs run on a machine, e.g. `native` or `fprop native, ...`."""
    from megatron_snip.linears.backends import here

    found = {gemm: here(backend, fmt, gemm, machine).how for gemm in Gemm}
    if len(set(found.values())) == 1:
        return str(found[Gemm.FPROP])
    return ", ".join(f"{gemm} {word}" for gemm, word in found.items())


def reasons(backend: Backend, machine: Machine) -> dict[str, list[str]]:
    """Return why quantized formats run as they do: reason -> formats (with GEMMs) that share it."""
    from megatron_snip.linears.backends import here

    found: dict[str, list[str]] = {}
    for fmt in (f.name for f in FORMATS.values() if f.quantized):
        gemms: dict[str, list[str]] = {}
        for gemm in Gemm:
            cell = here(backend, fmt, gemm, machine)
            gemms.setdefault(f"{cell.how}: {cell.why}", []).append(gemm)
        for why, each in gemms.items():
            which = fmt if len(gemms) == 1 else f"{fmt} ({', '.join(each)})"
            found.setdefault(why, []).append(which)
    return found


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
    from megatron_snip.kernels import dispatch
    from megatron_snip.linears.backends import CAPABILITIES, Backend, column
    from megatron_snip.linears.native_support import with_native
    from megatron_snip.linears.te_support import this_machine

    machine = with_native(this_machine(with_te=True))
    where = column(machine.capability)
    name = "this machine" if where is None else CAPABILITIES[where]
    console.print(f"How GEMMs run on {name}, by backend (--snip-backend; see docs/backends.md)")
    table = _table("format", "bits", *Backend)
    for fmt in FORMATS.values():
        cells = [how(backend, fmt.name, machine) for backend in Backend]
        table.add_row(fmt.name, str(fmt.bits), *cells)
    console.print(table)
    table = _table("backend", "formats", "why")
    for backend in Backend:
        for why, formats in reasons(backend, machine).items():
            table.add_row(backend, ", ".join(formats), why)
    console.print(table)
    choice = dispatch.explain()
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

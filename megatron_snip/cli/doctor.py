"""`megatron-snip doctor`: what this machine can run, and the command line to use on it.

`--patches` lists every patch of Megatron with its status: whether the function exists, takes what
SNIP passes, and belongs to a tested release.
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console

from megatron_snip.cli.common import console, new_table
from megatron_snip.errors import SnipError
from megatron_snip.formats import FORMATS
from megatron_snip.reporting.run_directory import versions
from megatron_snip.types import Gemm
from megatron_snip.version import __version__

if TYPE_CHECKING:
    from megatron_snip.linears.backends import Machine

SCRIPT = "pretrain_gpt.py ARGS"
"""The user's own Megatron script, in the recommended command line."""


class PatchStatus(NamedTuple):
    """One patch: its name, the flag that installs it, what it does, where, and its status."""

    name: str
    when: str
    purpose: str
    target: str
    status: str
    detail: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument(
        "--patches", action="store_true", help="also list every patch of Megatron and its status"
    )


def run(args: argparse.Namespace) -> int:
    """Print what was found; return 0, or 1 if `--patches` finds one that cannot be used."""
    from megatron_snip.linears.te_support import this_machine

    machine, out = this_machine(with_te=True), console()
    _print_machine(out)
    _print_formats(out, machine)
    statuses = patch_statuses() if args.patches else []
    if args.patches:
        _print_patches(out, statuses)
    out.print(f"Recommended on this machine:\n  {recommended_command(machine)}", soft_wrap=True)
    return int(any(patch.status in ("unusable", "overwritten") for patch in statuses))


def recommended_command(machine: Machine) -> str:
    """Return the command line that trains with SNIP on a machine."""
    with_te = machine.te_version is not None and "blockwise" not in machine.te_unavailable
    major = None if machine.capability is None else machine.capability[0]
    if with_te and major in (9, 10):
        formats = "bf16,fp8" if major == 9 else "bf16,fp8,nvfp4"
        flags = f"--transformer-impl transformer_engine --snip --snip-formats {formats}"
    else:
        flags = "--transformer-impl local --snip --snip-formats fp8,fp4"
    cpu = "--cpu " if machine.capability is None else ""
    return f"torchrun --nproc-per-node N -m megatron_snip {cpu}{SCRIPT} {flags}"


def patch_statuses() -> list[PatchStatus]:
    """Return all patches of the installed Megatron, those of linears' instances included."""
    from megatron_snip.patches.seams import LINEAR_TARGETS, REGISTRY

    found = [
        PatchStatus(
            patch.name, patch.when, patch.purpose, str(patch.target), state.word, state.detail
        )
        for patch in REGISTRY.seams
        for state in [REGISTRY.state(patch)]
    ]
    for target in LINEAR_TARGETS:
        problem = target.problem()
        status = "ready" if problem is None else "unusable"
        purpose = "quantizes, on each planned instance"
        found.append(PatchStatus("linear", "--snip", purpose, str(target), status, problem or ""))
    return found


def _print_machine(out: Console) -> None:
    import torch

    table = new_table(("", "found"))
    for name, version in {**versions(), "megatron-snip": __version__}.items():
        table.add_row(name, version or "not installed")
    cores = len(os.sched_getaffinity(0))
    table.add_row("cpu", f"{cores} cores for this process, {torch.get_num_threads()} threads")
    if not torch.cuda.is_available():
        why = "torch is built without CUDA" if torch.version.cuda is None else "no driver"
        table.add_row("cuda", f"not available: {why}; python -m megatron_snip --cpu SCRIPT")
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device = torch.cuda.get_device_properties(index)
        capability = f"compute capability {device.major}.{device.minor}"
        memory = f"{device.total_memory / 2**30:.0f} GiB"
        table.add_row(f"cuda:{index}", f"{device.name}, {capability}, {memory}")
    out.print(table)


def _print_formats(out: Console, machine: Machine) -> None:
    from megatron_snip.linears.backends import Backend, here

    capability = machine.capability
    name = "no GPU" if capability is None else "compute capability {}.{}".format(*capability)
    out.print(f"How GEMMs run here ({name}), by --snip-backend; see docs/backends.md")
    table = new_table(("format", "bits", "simulate", "te", "under te"))
    for fmt in FORMATS.values():
        simulate, te = (
            here(backend, fmt.name, Gemm.FPROP, machine)
            for backend in (Backend.SIMULATE, Backend.TE)
        )
        table.add_row(fmt.name, str(fmt.bits), str(simulate.how), str(te.how), te.why)
    out.print(table)


def _print_patches(out: Console, patches: list[PatchStatus]) -> None:
    from megatron_snip.patches.target import TESTED, core_version, version_is_tested

    try:
        version = core_version()
        tested = "tested" if version_is_tested(version) else "not tested"
        out.print(f"megatron-core {version} ({tested}; tested releases: {TESTED})")
    except SnipError as error:
        out.print(str(error))
    table = new_table(("patch", "for", "status", "what it does, and the function"))
    for patch in patches:
        table.add_row(patch.name, patch.when, patch.status, f"{patch.purpose}\n{patch.target}")
    out.print(table)
    for detail in dict.fromkeys(patch.detail for patch in patches if patch.detail):
        out.print(detail)

"""`megatron-snip doctor`: what this machine can run, and the command line to use on it.

`--patches` lists every patch of Megatron with its status: whether the function exists, takes what
SNIP passes, and belongs to a tested release.
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from rich.console import Console

from megatron_snip.cli.common import console, new_table
from megatron_snip.errors import SnipError
from megatron_snip.formats import FORMATS
from megatron_snip.reporting.run_directory import versions
from megatron_snip.version import __version__

if TYPE_CHECKING:
    from megatron_snip.linears.availability import Machine

SCRIPT = "pretrain_gpt.py ARGS"
"""The user's own Megatron script, in the recommended command line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument(
        "--patches", action="store_true", help="also list every patch of Megatron and its status"
    )


def run(args: argparse.Namespace) -> int:
    """Print what was found; return 0, or 1 if `--patches` finds one that cannot be used."""
    from megatron_snip.linears.availability import this_machine

    machine, out = this_machine(with_te=True), console()
    _print_machine(out)
    _print_formats(out, machine)
    status = _print_patches(out) if args.patches else 0
    out.print(f"Recommended on this machine:\n  {recommended_command(machine)}", soft_wrap=True)
    return status


def recommended_command(machine: Machine) -> str:
    """Return the command line that trains with SNIP on a machine."""
    from megatron_snip.linears.availability import te_support

    layers = "local"
    if machine.capability is not None and machine.te_version is not None:
        on_tensor_cores = te_support("fp8", machine)[0]
        layers = "transformer_engine" + ("" if on_tensor_cores else " --snip-backend simulate")
    cpu = "--cpu " if machine.capability is None else ""
    words = f"torchrun --nproc-per-node N -m megatron_snip {cpu}{SCRIPT}"
    return f"{words} --transformer-impl {layers} --snip"


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
    import torch

    from megatron_snip.kernels import launch
    from megatron_snip.linears.availability import te_support

    out.print(f"How GEMMs run here ({machine}), by --snip-backend; see docs/backends.md")
    table = new_table(("format", "bits", "simulate", "te", "under te"))
    for fmt in FORMATS.values():
        simulate = "simulated" if fmt.quantized else "native"
        recipe, text = te_support(fmt.name, machine)
        te = "native" if recipe else "refused"
        table.add_row(fmt.name, str(fmt.bits), simulate, te, text)
    out.print(table)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    why = launch.obstacle(device, (1, 128))
    what = f"PyTorch operations quantize ({why})" if why else "Triton kernels quantize"
    out.print(f"With --snip-backend simulate, {what}")


def _print_patches(out: Console) -> int:
    """Print every patch; return 1 if one cannot be used."""
    from megatron_snip.patches.install import REGISTRY
    from megatron_snip.patches.registry import TESTED, core_version, is_tested

    try:
        version = core_version()
        tested = "tested" if is_tested(version) else "not tested"
        out.print(f"megatron-core {version} ({tested}; tested releases: {TESTED})")
    except SnipError as error:
        out.print(str(error))
    table = new_table(("patch", "for", "status", "what it does, and the function"))
    states = {patch: REGISTRY.status(patch) for patch in REGISTRY.patches}
    for patch, status in states.items():
        table.add_row(patch.name, patch.when, status.state, f"{patch.purpose}\n{patch.target}")
    out.print(table)
    for detail in dict.fromkeys(s.detail for s in states.values() if s.detail):
        out.print(detail)
    return int(any(s.state in ("unusable", "overwritten") for s in states.values()))

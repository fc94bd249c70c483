"""What `megatron-snip doctor` prints of a machine whose packages can be imported."""

import os
from dataclasses import replace
from importlib.util import find_spec

import torch
from rich.console import Console

from megatron_snip.cli.common import new_table
from megatron_snip.formats import FORMATS
from megatron_snip.kernels import launch
from megatron_snip.linears.te.machine import Machine, te_support, this_machine
from megatron_snip.linears.te.recipe_table import RECIPES
from megatron_snip.patches.changes import CHANGES
from megatron_snip.patches.install import CORE_PATCHES, LOOPS


def show(out: Console) -> None:
    """Print devices, formats, Megatron's functions and the recommended command."""
    machine = this_machine(with_te=True)
    _print_devices(out)
    _print_formats(out, machine)
    if machine.capability is not None and machine.te_version is not None:
        _print_runs(out, machine)
    _print_functions(out)
    out.print(
        "What SNIP would do with a job, before it is queued: megatron-snip preflight SCRIPT ARGS"
    )
    out.print(f"Recommended on this machine:\n  {recommended_command(machine)}", soft_wrap=True)


def show_changes(out: Console) -> None:
    """Print the registry of changes, with what was found of each entry here."""
    for change in CHANGES:
        out.print("\n".join(change.targets), markup=False, soft_wrap=True, style="bold")
        rows = {
            "why": change.reason,
            "upstream": change.upstream,
            "releases": change.releases,
            "goes": change.until,
            "file": change.where,
            "here": change.found(),
        }
        for name, text in rows.items():
            out.print(f"  {name:9}{text}", markup=False, soft_wrap=True)


def recommended_command(machine: Machine) -> str:
    """Return the command line that trains with SNIP on a machine."""
    layers = "local"
    if machine.capability is not None and machine.te_version is not None:
        on_tensor_cores = te_support("fp8", machine)[0]
        layers = "transformer_engine" + ("" if on_tensor_cores else " --snip-backend simulate")
    cpu = "--cpu " if machine.capability is None else ""
    words = f"torchrun --nproc-per-node N -m megatron_snip {cpu}pretrain_gpt.py ARGS"
    return f"{words} --transformer-impl {layers} --snip"


def _print_devices(out: Console) -> None:
    table = new_table(("", "found"))
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
    out.print(f"How GEMMs run here ({machine}), by --snip-backend; see docs/backends.md")
    table = new_table(("format", "bits", "simulate", "te", "under te"))
    for fmt in FORMATS.values():
        simulate = "simulated" if fmt.quantized else "native"
        recipe, text = te_support(fmt.name, machine)
        table.add_row(fmt.name, str(fmt.bits), simulate, "native" if recipe else "refused", text)
    out.print(table)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    why = launch.obstacle(device, (1, 128))
    what = f"PyTorch operations quantize ({why})" if why else "Triton kernels quantize"
    out.print(f"With --snip-backend simulate, {what}")


def _print_runs(out: Console, machine: Machine) -> None:
    out.print("The table is that of a BF16 run. In a run with flags of its own:")
    table = new_table(("the run's flags", "format", "under te"))
    for recipe in RECIPES.values():
        if recipe.precision.kind:
            text = te_support(recipe.precision.kind, replace(machine, job=recipe.precision))[1]
            table.add_row(recipe.precision.flags, recipe.precision.kind, text)
    out.print(table)


def _print_functions(out: Console) -> None:
    loops = [loop for loop in LOOPS if find_spec(loop.package) is not None]
    if find_spec("megatron.training") is None:
        out.print(
            "megatron.training is not installed, which scripts such as pretrain_gpt.py import: run "
            "them in a Megatron-LM checkout, or take Python 3.12 and megatron-core 0.17 or later. "
            "'megatron-snip train' needs neither"
        )
    for loop in loops:
        needed = [patch for patch in (*CORE_PATCHES, *loop.patches) if not patch.optional]
        problems = [problem for patch in needed if (problem := patch.problem()) is not None]
        found = f"{len(needed) - len(problems)} of {len(needed)}"
        out.print(
            f"{loop.name} has {found} functions that SNIP wraps, with the parameters it needs"
        )
        for problem in problems[:1]:
            out.print(problem, markup=False)

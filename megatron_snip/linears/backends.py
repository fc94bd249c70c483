"""What runs where: for every backend, format, GEMM and compute capability, in one place.

Three backends run the same plan:

    simulate   our linears: operands are quantized exactly as measured, multiplied in FP32
    native     our linears on FP8 tensor cores
    te         Transformer Engine's linears under its own recipes

and a GEMM of a format is, on a GPU of some compute capability,

    native         multiplied by tensor cores in exactly the format that was measured
    simulated      exact operands, FP32 multiplication: right results, no speed
    approximated   multiplied by tensor cores in a neighbouring format; `why` says what differs
    refused        not run; `why` says what is missing

docs/backends.md is printed from here (`python -m megatron_snip.linears.backends`), `doctor` prints
the machine's own column, and `resolve` is what the linears obey.

Sources: NVIDIA's compute capabilities (FP8 tensor cores from 8.9, block-scaled ones from 10.0);
Transformer Engine 2.20's checks of recipes (`is_mxfp8_available` and the like).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from megatron_snip.errors import UnsupportedError
from megatron_snip.formats import E2M1, E4M3, FORMATS, ScaleType, get_format
from megatron_snip.options import Option
from megatron_snip.planning.te_recipe import TERecipe
from megatron_snip.types import Gemm

CAPABILITIES: dict[str, str] = {
    "8.0": "Ampere (8.0, 8.6)",
    "8.9": "Ada (8.9)",
    "9.0": "Hopper (9.0)",
    "10.x": "Blackwell (10.0, 10.3)",
    "12.x": "Blackwell (12.0, 12.1)",
}
"""The columns of the table, with what they are called."""


class Backend(StrEnum):
    """Who runs a linear's GEMMs."""

    SIMULATE = "simulate"
    NATIVE = "native"
    TE = "te"


class How(StrEnum):
    """How a GEMM runs; see the file's description."""

    NATIVE = "native"
    SIMULATED = "simulated"
    APPROXIMATED = "approximated"
    REFUSED = "refused"


@dataclass(frozen=True)
class Support:
    """One cell of the table.

    Attributes:
        how: how the GEMM runs.
        why: what that means here, in a few words.
        word: of the Transformer Engine recipe that runs it; empty elsewhere.
    """

    how: How
    why: str
    word: str = ""


@dataclass(frozen=True)
class Machine:
    """What decides how linears run here; the same on all ranks of a job.

    Attributes:
        capability: (major, minor) of the GPU, or None without one.
        te_version: of Transformer Engine, or None where it cannot be imported.
        te_per_gemm: whether its CustomRecipe lets every GEMM choose.
        te_unavailable: what Transformer Engine itself says it cannot run here: word -> its reason.
        native_obstacle: what keeps FP8 GEMMs of our own from running right; empty if nothing does.
    """

    capability: tuple[int, int] | None = None
    te_version: str | None = None
    te_per_gemm: bool = False
    te_unavailable: Mapping[str, str] = field(default_factory=dict)
    native_obstacle: str = ""


def column(capability: tuple[int, int] | None) -> str | None:
    """Return the table's column of a compute capability; None where it has none."""
    if capability is None:
        return None
    major, minor = capability
    if major == 8:
        return "8.9" if minor == 9 else "8.0"
    return {9: "9.0", 10: "10.x", 12: "12.x"}.get(major)


def support(backend: Backend, fmt: str, gemm: Gemm, where: str | None) -> Support:
    """Return one cell of the table.

    Args:
        backend: who is to run the GEMM.
        fmt: name of a format.
        gemm: which GEMM.
        where: a key of CAPABILITIES; None for a machine without a GPU, or with another one.

    Raises:
        UsageError: if the format is unknown.
    """
    if not get_format(fmt).quantized:
        return Support(How.NATIVE, "as Megatron runs it", "bf16")
    if backend is Backend.SIMULATE:
        return Support(How.SIMULATED, "operands exactly as measured, multiplied in FP32")
    if where is None:
        return Support(How.REFUSED, "needs a GPU of compute capability 8.0 to 12.1")
    if backend is Backend.NATIVE:
        return _native(fmt, gemm, where)
    return _te(fmt, gemm, where)


def here(backend: Backend, fmt: str, gemm: Gemm, machine: Machine) -> Support:
    """Return the cell of a machine, with what its libraries themselves say.

    Raises:
        UsageError: if the format is unknown.
    """
    cell = support(backend, fmt, gemm, column(machine.capability))
    if backend is Backend.NATIVE and machine.native_obstacle and get_format(fmt).quantized:
        return cell if cell.how is How.REFUSED else Support(How.REFUSED, machine.native_obstacle)
    if backend is not Backend.TE or cell.how is How.REFUSED or cell.word == "bf16":
        return cell
    if machine.te_version is None:
        return Support(How.REFUSED, "Transformer Engine cannot be imported")
    if cell.word in machine.te_unavailable:
        return Support(How.REFUSED, machine.te_unavailable[cell.word])
    return cell


def _native(fmt: str, gemm: Gemm, where: str) -> Support:
    if where == "8.0":
        return Support(How.REFUSED, "no FP8 tensor cores before 8.9")
    row = get_format(fmt)
    if (row.tile, row.weight_block) != (128, (128, 128)) or row.scale is ScaleType.E4M3:
        return Support(How.REFUSED, "only FP32 scales of 128 elements; simulate it")
    if row.wgrad_hadamard and gemm is Gemm.WGRAD:
        return Support(How.REFUSED, "no kernel for the Hadamard transform; simulate it")
    if where == "8.9":
        return Support(How.REFUSED, "FP8 GEMMs under 1x128 scales need 9.0")
    if where != "9.0":
        return Support(How.REFUSED, "FP8 GEMMs under 1x128 scales are Hopper's alone; use te")
    if row.element is E4M3:
        return Support(How.NATIVE, "E4M3 under FP32 scales")
    return Support(How.NATIVE, "exact in E4M3 bytes under its own scales, at FP8's speed")


_NO_BLOCK_SCALED_FP4 = "NVFP4 GEMMs need 10.0"
_NVFP4_IS = {
    Gemm.FPROP: "weights share a scale per 16x16 block, not per 1x16 tile",
    Gemm.DGRAD: "weights share a scale per 16x16 block, not per 1x16 tile",
    Gemm.WGRAD: "both operands go through a random Hadamard transform first",
}


def _te(fmt: str, gemm: Gemm, where: str) -> Support:
    blackwell = where in ("10.x", "12.x")
    if fmt == "mxfp4":
        return Support(How.REFUSED, "Transformer Engine has no MXFP4 recipe")
    if fmt == "fp3":
        return Support(How.REFUSED, "no hardware format")
    row = get_format(fmt)
    if row.element is E2M1:
        if not blackwell:
            return Support(How.REFUSED, _NO_BLOCK_SCALED_FP4)
        if fmt == "nvfp4_rht" and gemm is Gemm.WGRAD:
            return Support(How.APPROXIMATED, "the NVFP4 recipe, under other random signs", "nvfp4")
        tiles = "" if row.scale is ScaleType.E4M3 else "NVFP4 in 1x16 tiles, not 1x128; "
        return Support(How.APPROXIMATED, tiles + _NVFP4_IS[gemm], "nvfp4")
    if where == "12.x":
        return Support(How.REFUSED, "its MXFP8 GEMMs do not cover 12.x")
    if fmt == "mxfp8":
        if not blackwell:
            return Support(How.REFUSED, "MXFP8 GEMMs need 10.0")
        return Support(How.NATIVE, "the MXFP8 recipe", "mxfp8")
    assert row.element is E4M3
    if blackwell:
        return Support(How.APPROXIMATED, "MXFP8: 1x32 tiles, power-of-two scales", "mxfp8")
    if where == "9.0" and row.scale is ScaleType.E8M0:
        return Support(
            How.NATIVE,
            "the blockwise recipe (without NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1)",
            "blockwise",
        )
    if where == "9.0":
        return Support(
            How.APPROXIMATED,
            "the blockwise recipe: same tiles, scales rounded up to powers of two "
            "(exact with NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1 where all GEMMs are fp8)",
            "blockwise",
        )
    return Support(How.REFUSED, "the blockwise recipe needs 9.0")


def refusal(backend: Backend, option: Option, machine: Machine) -> str | None:
    """Return why a backend cannot run an option on a machine, or None if it can."""
    for gemm in Gemm:
        cell = here(backend, option[gemm], gemm, machine)
        if cell.how is How.REFUSED:
            shown = "no GPU" if machine.capability is None else _dotted(machine.capability)
            return f"{option[gemm]} on {shown}: {cell.why}"
    if backend is Backend.TE and not (te_recipe(option, machine).is_uniform or machine.te_per_gemm):
        return (
            f"{option}: Transformer Engine {machine.te_version} has no quantizers by GEMM "
            "(CustomRecipe with HybridQuantizer)"
        )
    return None


def resolve(choice: str, fmt: str, gemm: Gemm, machine: Machine) -> Backend:
    """Return who runs a GEMM of a linear of Megatron's own under `--snip-backend`.

    Args:
        choice: `simulate`, `native`, or `auto`, which simulates what `native` refuses.
        fmt: a quantized format that the choice does not refuse.
        gemm: which GEMM.
        machine: where.
    """
    if choice == "native":
        return Backend.NATIVE
    runs = here(Backend.NATIVE, fmt, gemm, machine).how is not How.REFUSED
    return Backend.NATIVE if choice == "auto" and runs else Backend.SIMULATE


def te_recipe(option: Option, machine: Machine) -> TERecipe:
    """Return the recipe that runs an option under Transformer Engine.

    Raises:
        UnsupportedError: if a GEMM's format cannot run there.
    """
    where = column(machine.capability)
    words = []
    for gemm in Gemm:
        cell = support(Backend.TE, option[gemm], gemm, where)
        if cell.how is How.REFUSED:
            raise UnsupportedError(f"Transformer Engine cannot run {option}: {cell.why}")
        words.append(cell.word)
    return TERecipe(*words)


def _dotted(capability: tuple[int, int]) -> str:
    return f"compute capability {capability[0]}.{capability[1]}"


def rows(backend: Backend) -> list[tuple[str, tuple[Gemm, ...], dict[str, Support]]]:
    """Return a backend's table: (format, GEMMs that agree, cell by column), in order."""
    table = []
    for fmt in FORMATS:
        by_cells: dict[tuple[Support, ...], list[Gemm]] = {}
        for gemm in Gemm:
            cells = tuple(support(backend, fmt, gemm, where) for where in CAPABILITIES)
            by_cells.setdefault(cells, []).append(gemm)
        table += [
            (fmt, tuple(gemms), dict(zip(CAPABILITIES, cells, strict=True)))
            for cells, gemms in by_cells.items()
        ]
    return table


INTRODUCTION = """\
# What runs where

<!-- Printed by `python -m megatron_snip.linears.backends`; a test compares the two. -->

The same plan can run three ways, chosen by `--snip-backend`:

- `simulate`: our linears (Megatron's `ColumnParallelLinear` and `RowParallelLinear`). Operands are
  quantized exactly as they were measured and multiplied in FP32. Works on every machine, also
  without a GPU.
- `native`: our linears on FP8 tensor cores. The same operands bit for bit; only the accumulation
  differs.
- `te`: Transformer Engine's linears (`--transformer-impl transformer_engine`) under recipes that
  SNIP sets between steps.

`auto`, the default, is `te` for Transformer Engine's linears. For Megatron's it decides by format
and GEMM: `native` where the table below says so and a check at the start (three small GEMMs against
the CPU) passes, else `simulate`.

A cell says how a GEMM runs: **native** (tensor cores, exactly the format that was measured),
**approximated** (tensor cores, a neighbouring format), **simulated** (exact operands, FP32
multiplication) or **refused**, with the reason. Formats are defined in `megatron_snip/formats.py`.
Under `te` an option that differs by GEMM needs a Transformer Engine with `CustomRecipe` roles and
`HybridQuantizer`; grouped experts take one format for all three GEMMs. What Transformer Engine
itself says it cannot run on the machine is refused as well, whatever the table says.

Refused under `te` whatever the format: `--tp-comm-overlap`, whose communication buffers are made
for one precision, and, where the input is gathered over tensor-parallel ranks (sequence
parallelism, column-parallel linears), options whose wgrad is finer than their fprop, because the
gathered input is kept in fprop's format.

Experts of Transformer Engine run quantized only where Megatron pads their tokens, which it does for
the run's own recipe (`--fp8-format`, `--fp4-format`); without one they stay BF16, with a warning.

Linears that every tensor-parallel rank holds whole (the down projections of latent attention, the
projections around latent experts) are planned as on one rank: each is one row of the plan, and
ranks measure it on all tokens. Other such linears (a sparse attention's indexer) stay BF16 where
there are several tensor-parallel ranks, with a warning that names them.

Which recipe every module runs, and that a new plan changes it between two steps, was checked
against Transformer Engine 2.20.2 under Megatron-Core 0.16.1 and 0.19.2 on a machine without a GPU;
its GEMMs were not run there.

A plan goes to Megatron's own `--te-precision-config-file`, and such a file becomes a plan, with
`megatron-snip export` and `megatron-snip import`. `--snip-precision-log` says at every plan change
what each linear resolved to.

`megatron-snip doctor` prints the column of the machine it runs on.
"""


def markdown() -> str:
    """Return docs/backends.md."""
    parts = [INTRODUCTION]
    for backend in Backend:
        heading = ["format", "GEMM", *(CAPABILITIES[c] for c in CAPABILITIES)]
        lines = [f"\n## {backend}\n", _line(heading), _line(["---"] * len(heading))]
        for fmt, gemms, cells in rows(backend):
            shown = [f"**{cell.how}**: {cell.why}" for cell in cells.values()]
            lines.append(_line([f"`{fmt}`", ", ".join(gemms), *shown]))
        parts.append("\n".join(lines) + "\n")
    return "".join(parts)


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    print(markdown(), end="")

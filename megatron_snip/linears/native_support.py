"""Whether FP8 GEMMs of our own run right on this machine: asked, and tried, once a process.

Small GEMMs, fprop, dgrad and wgrad in fp8 and fp4, run on the device from the bytes that its
kernels make, and are compared with the emulation in FP64 from the same bytes. Depths of 1, 5 and 3
scale blocks and grids that are not square tell a wrong layout, padding or transpose from a right
one; dims that 128 does not divide, and a single token, are tried as well, and dims are padded to
128 where those fail. A library that refuses is an obstacle. All of it also compiles the kernels
that training needs, before the first step.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
import torch.distributed as dist

from megatron_snip.collectives import gather_json
from megatron_snip.linears import native
from megatron_snip.linears.backends import Machine
from megatron_snip.linears.native_gemm import (
    ALIGNMENT,
    TILE,
    GemmOperand,
    align_to,
    alignment,
    emulated_mm,
    multiply,
)
from megatron_snip.options import Option
from megatron_snip.quantizers import StochasticStream, StreamKey
from megatron_snip.types import Gemm

Shape = tuple[int, int, int]
"""M tokens, K in_features, N out_features."""

WHOLE: Shape = (384, 128, 640)
"""Depths of 1 (fprop), 5 (dgrad) and 3 (wgrad) blocks; grids 3 x 1, 5 x 1, 3 x 5."""

RAGGED: tuple[Shape, ...] = ((200, 176, 328), (1, 144, 272))
"""Dims that end within a block, multiples of 16 and of 8 alone, and a single token."""


def with_native(machine: Machine) -> Machine:
    """Return the machine with what keeps native GEMMs from running on it."""
    return replace(machine, native_obstacle=native_obstacle(machine.capability))


def agreed(machine: Machine, control: dist.ProcessGroup | None) -> Machine:
    """All ranks: refuse native GEMMs where one rank does, and pad as one rank must.

    Ranks of a sequence-parallel linear gather each other's bytes: they run alike or wait forever.

    Args:
        machine: as `with_native` returned it.
        control: group of all ranks, or None for one.
    """
    told = gather_json([machine.native_obstacle, alignment()], control)
    align_to(max(padding for _, padding in told))
    if machine.native_obstacle:
        return machine
    refused = (f"on rank {rank} {why}" for rank, (why, _) in enumerate(told) if why)
    return replace(machine, native_obstacle=next(refused, ""))


def native_obstacle(capability: tuple[int, int] | None) -> str:
    """Return what keeps native GEMMs from running here, or an empty string.

    Args:
        capability: of the GPU, or None without one.
    """
    if capability is None:
        return "needs a GPU of compute capability 9.0"
    if capability[0] != 9:
        return f"needs compute capability 9.0, this GPU has {capability[0]}.{capability[1]}"
    if not hasattr(torch.nn.functional, "scaled_mm"):
        return f"torch {torch.__version__} has no scaled_mm (2.10 has)"
    return _tried()


@lru_cache(maxsize=1)
def _tried() -> str:
    device = torch.device("cuda")
    failed = _failure(device, WHOLE)
    if failed:
        return failed
    for multiple in (ALIGNMENT, TILE):
        align_to(multiple)
        failed = next((why for shape in RAGGED if (why := _failure(device, shape))), "")
        if not failed:
            return ""
    align_to(ALIGNMENT)
    return failed


def _failure(device: torch.device, shape: Shape) -> str:
    """What is wrong with GEMMs of a shape, or an empty string."""
    said = "its check failed"
    if shape != WHOLE:
        said = f"its check with {shape[0]} tokens of {shape[1]} and {shape[2]} features failed"
    try:
        error, where = worst_error(device, shape)
    except Exception as failure:  # whatever it is, `simulate` remains
        return f"{said}: {type(failure).__name__}: {' '.join(str(failure).split())[:200]}"
    if error <= native.DEVICE_TOLERANCE:  # NaN is not
        return ""
    return (
        f"{said}: {where} is off by {error:.1e} of the sum of its products, at most "
        f"{native.DEVICE_TOLERANCE:.1e} was expected"
    )


def worst_error(device: torch.device, shape: Shape = WHOLE) -> tuple[float, str]:
    """Return the largest error over the sum of the products' magnitudes, and whose it is.

    Args:
        device: where to multiply; the truth is computed on the CPU.
        shape: M tokens, K in_features, N out_features.
    """
    errors = {}
    for name in ("fp8", "fp4"):
        for gemm, (a, b) in sample_operands(name, device, shape).items():
            for dtype in (torch.float32, torch.bfloat16):
                said = f"{gemm} in {name} to {str(dtype).removeprefix('torch.')}"
                errors[said] = gemm_error(a, b, dtype)
    where = max(errors, key=lambda key: errors[key] if errors[key] == errors[key] else torch.inf)
    return errors[where], where


def gemm_error(a: GemmOperand, b: GemmOperand, dtype: torch.dtype) -> float:
    """Return the largest error of A B^T over the sum of the products' magnitudes.

    What rounding the result to `dtype` takes is not counted.

    Args:
        a: [rows, depth], where it is to be multiplied.
        b: [cols, depth].
        dtype: of the result, BF16 or FP32.
    """
    truth, size = _truth(a, b)
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 0.0
    found = multiply(a, b, dtype).cpu().double()
    off = (found - truth).abs() - rounding * truth.abs()
    return float((off.clamp(min=0.0) / size).max())


def sample_operands(
    name: str, device: torch.device, shape: Shape = WHOLE
) -> dict[Gemm, tuple[GemmOperand, GemmOperand]]:
    """Return random operands of the three GEMMs in a format.

    Args:
        name: fp8, fp4 or fp3.
        device: where to quantize.
        shape: M tokens, K in_features, N out_features.
    """
    m, k, n = shape
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        spread = torch.exp2(torch.randint(-8, 8, (size[0], 1), generator=generator).float())
        values = torch.randn(size, generator=generator) * spread
        return values.bfloat16().to(device)

    option = Option.uniform(name)
    stream = StochasticStream(StreamKey(0, "check", 0, 0))
    x_row, x_tokens = native.input_operands(draw(m, k), option, True, True)
    g_row, g_tokens = native.grad_operands(draw(m, n), option, stream, True, True)
    w = draw(n, k)
    forward, backward = (
        native.weight_operand(w, option, gemm, lambda _, make: make())
        for gemm in (Gemm.FPROP, Gemm.DGRAD)
    )
    assert x_row and x_tokens and g_row and g_tokens
    return {
        Gemm.FPROP: (x_row, forward),
        Gemm.DGRAD: (g_row, backward),
        Gemm.WGRAD: (g_tokens, x_tokens),
    }


def _truth(a: GemmOperand, b: GemmOperand) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the product in FP64, and the sum of its terms' magnitudes."""
    codes, scales = ([t.cpu() for t in (a.codes, b.codes)], [_kept(a.scales), _kept(b.scales)])
    plain = emulated_mm(codes[0], scales[0], codes[1], scales[1], b.square, torch.float64)
    codes = [t & 0x7F for t in codes]  # without signs
    size = emulated_mm(codes[0], scales[0], codes[1], scales[1], b.square, torch.float64)
    inside = (slice(a.rows), slice(b.rows))
    return plain[inside], size[inside].clamp(min=torch.finfo(torch.float64).tiny)


def _kept(scales: torch.Tensor) -> torch.Tensor:
    """Bring scales to the CPU with their strides."""
    out = torch.empty_strided(scales.shape, scales.stride(), dtype=scales.dtype)
    return out.copy_(scales)

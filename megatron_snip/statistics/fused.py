"""What `measure.operand_sums` returns, from few launches of Triton's kernels.

`observe_kernel` reads an operand once for two formats; every two more formats need a launch. Three
operations zero its sums and put them in order. Counts, bins and amaxes are equal to PyTorch's; sums
of squares differ by about 1e-6, because they are added in another order.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple, Self

import torch
from torch import Tensor

from megatron_snip.formats import Format
from megatron_snip.kernels import launch
from megatron_snip.kernels.launch import NUM_BINS, NUM_SUMS, LaunchConfig
from megatron_snip.quantizers.quantize import operand_block, philox_arguments, prepare
from megatron_snip.quantizers.stochastic import StochasticStream
from megatron_snip.statistics.measure import HISTOGRAM_STRIDE, OperandSums
from megatron_snip.statistics.operands import MEASURED_IN, Operands
from megatron_snip.types import Operand

ROW_CONFIG = LaunchConfig(16, 128, 4)
"""Tiles along the row: 16 elements per thread, because two formats need registers."""

SQUARE_CONFIG = LaunchConfig(128, 128, 16)
"""Square blocks of weights."""


def is_fused(operands: Operands, formats: Mapping[str, Format]) -> bool:
    """Return whether the kernels measure a linear; else PyTorch does, with the same results."""
    tensors = [x for operand in Operand if (x := operands.of(operand)) is not None]
    has_dtypes = all(x.dtype in (torch.bfloat16, torch.float32) for x in tensors)
    blocks = [
        operand_block(fmt, o, gemm) for fmt in formats.values() for o, gemm in MEASURED_IN.items()
    ]
    return has_dtypes and launch.use_kernels(operands.input.device, *blocks)


def operand_sums(
    operands: Operands, formats: Mapping[str, Format], stream: StochasticStream
) -> OperandSums:
    """Measure on this shard; `measure.operand_sums` has the contract."""
    fmts = tuple(formats.values())
    space = _Workspace.zeros(operands, fmts)
    for operand in Operand:
        _observe(space, operands, operand, fmts, stream)
    sums = torch.cat([space.sums.sum(-1, dtype=torch.float64), space.bins], -1)
    return OperandSums(sums, space.amax.view(torch.float32))


class _Workspace(NamedTuple):
    """What the kernels write, zeros at first; F formats, the operand itself after them.

    Attributes:
        sums: FP32 [3 operands, F + 1, NUM_SUMS, programs].
        bins: int32 [3 operands, F + 1, NUM_BINS].
        amax: int32 [3 operands], the bits of the largest magnitudes.
    """

    sums: Tensor
    bins: Tensor
    amax: Tensor

    @classmethod
    def zeros(cls, operands: Operands, formats: Sequence[Format]) -> Self:
        """Return zeros, in one operation."""
        width = 1
        for operand in Operand:
            x = operands.of(operand)
            for _, config in _launches(formats, operand):
                width = max(width, 0 if x is None else _num_programs(x, config))
        shapes = [
            (len(Operand), 1 + len(formats), NUM_SUMS, width),
            (len(Operand), 1 + len(formats), NUM_BINS),
            (len(Operand),),
        ]
        sizes = [math.prod(shape) for shape in shapes]
        flat = torch.zeros(sum(sizes), dtype=torch.int32, device=operands.input.device)
        parts = [p.view(s) for p, s in zip(flat.split_with_sizes(sizes), shapes, strict=True)]
        return cls(parts[0].view(torch.float32), *parts[1:])


def _launches(formats: Sequence[Format], operand: Operand) -> Iterator[tuple[range, LaunchConfig]]:
    """Yield what observes an operand: places of one or two formats, and the block of a program."""
    for first in range(0, len(formats), 2):
        places = range(first, min(first + 2, len(formats)))
        blocks = [operand_block(formats[i], operand, MEASURED_IN[operand]) for i in places]
        rows = max(block[0] for block in blocks)
        cols = max(block[1] for block in blocks)
        base = ROW_CONFIG if rows == 1 else SQUARE_CONFIG
        yield places, LaunchConfig(max(base.rows, rows), max(base.cols, cols), base.num_warps)


def _num_programs(x: Tensor, config: LaunchConfig) -> int:
    return math.ceil(x.shape[0] / config.rows) * math.ceil(x.shape[1] / config.cols)


def _observe(
    space: _Workspace,
    operands: Operands,
    operand: Operand,
    formats: Sequence[Format],
    stream: StochasticStream,
) -> None:
    """Quantize an operand to each format, and write its sums."""
    from megatron_snip.kernels.observe import observe_kernel

    x = operands.of(operand)
    if x is None or x.numel() == 0:
        return
    place = list(Operand).index(operand)
    for i, (places, config) in enumerate(_launches(formats, operand)):
        randoms = []
        specs = []
        numbers = []
        for fmt in (formats[each] for each in places):
            given = operands.amax_or_scale(fmt, operand)
            found = prepare(x, fmt, operand, MEASURED_IN[operand], stream, given)
            random = philox_arguments(found.stream, x.shape[1])
            randoms.append(random)
            specs.append(launch.tile_spec(found.fmt, found.block, random))
            # Any pointer where there is no number: it is not read.
            numbers.append(x if found.amax_or_scale is None else found.amax_or_scale)
        # Formats that are rounded stochastically take the same numbers.
        random = max(randoms, key=lambda each: each.mode)
        with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
            observe_kernel[(_num_programs(x, config),)](
                x,
                *x.stride(),
                numbers[0],
                numbers[-1],
                *x.shape,
                space.sums[place],
                space.sums.shape[-1],
                space.bins[place],
                space.amax[place],
                random.key,
                *random.columns,
                places[0],
                places[-1],
                R=config.rows,
                C=config.cols,
                SPEC_0=specs[0],
                SPEC_1=specs[1] if len(specs) > 1 else None,
                ORIGINAL=len(formats) if i == 0 else None,
                COL_STRIDE=HISTOGRAM_STRIDE,
                num_warps=config.num_warps,
            )

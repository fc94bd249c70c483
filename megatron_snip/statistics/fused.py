"""What `partial_sums` and `norm_sums` of measure.py return, from few launches of Triton's kernels.

For two formats, of a linear without shards:

    5 x observe_kernel   X and W of fprop, G of dgrad, X and G of wgrad
    3 mm, 3 bmm          Y, dX and dW, and those of all formats
    3 x errors_kernel    sums over rows of the products and their errors
    10 operations        put the sums in order

Norms alone need the first three launches of `observe_kernel`, which then write no values, and 9
operations.

W in blocks that are not square, a Hadamard transform, and every two more formats need launches of
their own. Products, counts, bins and amaxes have the bits of `partial_sums`; sums differ by about
1e-6, because they are added in another order.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from contextlib import nullcontext
from functools import lru_cache
from typing import NamedTuple, Self

import torch
from torch import Tensor

from megatron_snip.formats import Format
from megatron_snip.kernels import launch
from megatron_snip.kernels.launch import NUM_BINS, NUM_SUMS, LaunchConfig, PhiloxArguments
from megatron_snip.matmul import LARGE_GEMM
from megatron_snip.quantizers.quantize import (
    operand_block,
    philox_arguments,
    prepare,
    rotated,
)
from megatron_snip.quantizers.stochastic import StochasticStream
from megatron_snip.statistics.health import HISTOGRAM_STRIDE, WEIGHT_STRIDE
from megatron_snip.statistics.measure import NormSums, PartialSums, scalar_names
from megatron_snip.statistics.operands import Operands
from megatron_snip.statistics.rows import ERROR_SQUARE, OPERAND_SUMS, SATURATED, ZEROED
from megatron_snip.statistics.sample import to_device
from megatron_snip.statistics.sensitivity import Sensitivity
from megatron_snip.topology import LinearKind
from megatron_snip.types import Gemm, Operand

OBSERVED = (
    (Operand.INPUT, Gemm.FPROP),
    (Operand.WEIGHT, Gemm.FPROP),
    (Operand.GRAD_OUTPUT, Gemm.DGRAD),
    (Operand.INPUT, Gemm.WGRAD),
    (Operand.GRAD_OUTPUT, Gemm.WGRAD),
)
"""What is observed. Of the first three, which are in the order of `Operand`, health is reported."""

_X, _W, _G, _X_TILES, _G_TILES = range(len(OBSERVED))

_SCRATCH = len(OBSERVED)
"""Takes the sums of W in the blocks of dgrad, which are not used."""

_PRODUCTS = (Gemm.FPROP, Gemm.DGRAD, Gemm.WGRAD)
"""The GEMMs in the order of `_Workspace.rows`."""

ROW_CONFIG = LaunchConfig(16, 128, 4)
"""Tiles along the row: 16 elements per thread, because two formats need registers."""

COL_CONFIG = LaunchConfig(128, 64, 8)
"""Tiles along the column."""

SQUARE_CONFIG = LaunchConfig(128, 128, 16)
"""Square blocks of weights."""


def is_fused(operands: Operands, formats: Mapping[str, Format], products: bool = True) -> bool:
    """Return whether the kernels measure a linear; else PyTorch does, with the same results.

    They do on a GPU. They measure products where a linear is large enough for GEMMs in BF16, and
    norms alone where it has tokens.
    """
    x, w, g = operands.input, operands.weight.source, operands.grad_output
    has_dtypes = all(each.dtype in (torch.bfloat16, torch.float32) for each in (x, w, g))
    is_large = len(x) > 0
    if products:
        of_dgrad = operands.of(Operand.GRAD_OUTPUT, Gemm.DGRAD)
        of_wgrad = operands.grad_output_tiles
        is_large = min(len(of_dgrad) * w.numel(), of_wgrad.numel() * x.shape[1]) > LARGE_GEMM
    blocks = [
        operand_block(fmt, operand, gemm)
        for fmt in formats.values()
        for operand, gemm in _quantized(products)
    ]
    return has_dtypes and is_large and launch.use_kernels(x.device, *blocks)


def partial_sums(
    operands: Operands,
    *,
    kind: LinearKind,
    num_shards: int,
    formats: Mapping[str, Format],
    stream: StochasticStream,
    sensitivity: Sensitivity | None,
    features: slice,
) -> PartialSums:
    """Measure on this shard; `measure.partial_sums` has the contract."""
    fmts = tuple(formats.values())
    w = operands.weight.source
    tiles_stream = stream.with_column_stride(features.step or 1, w.shape[0])
    space = _Workspace.zeros(operands, fmts)

    x_q = _observe(space, _X, operands, fmts, None)
    g_q = _observe(space, _G, operands, fmts, stream)
    w_of_fprop, w_of_dgrad = _weight(space, operands, fmts)
    output, outputs = _products(operands.input, x_q, w.t(), w_of_fprop.transpose(1, 2))
    g = operands.of(Operand.GRAD_OUTPUT, Gemm.DGRAD)
    input_grad, input_grads = _products(g, g_q, w, w_of_dgrad)
    del x_q, g_q, w_of_fprop, w_of_dgrad
    x_q = _observe(space, _X_TILES, operands, fmts, None)
    g_q = _observe(space, _G_TILES, operands, fmts, tiles_stream)
    g_of_tiles = operands.grad_output_tiles.t()
    wgrad, wgrads = _products(g_of_tiles, g_q.transpose(1, 2), operands.input_tiles, x_q)

    _add_up(space, Gemm.FPROP, output, outputs, operands.grad_output)
    _add_up(space, Gemm.DGRAD, input_grad, input_grads)
    if sensitivity is None:
        _add_up(space, Gemm.WGRAD, wgrad, wgrads)
    else:
        _add_up(space, Gemm.WGRAD, wgrad, wgrads, sensitivity.col, sensitivity.row[features])

    is_row = kind == "row"
    amax = space.amax.view(torch.float32)
    per_token = space.rows[0, :, : len(operands.input)]
    if num_shards == 1:
        # All products are complete, and add up to numbers here.
        scalars, health = _in_order(space, operands, formats, "row", sensitivity, num_shards)
        return PartialSums(None, per_token, scalars, health, amax)
    scalars, health = _in_order(space, operands, formats, kind, sensitivity, num_shards)
    full, of_formats = (output, outputs) if is_row else (input_grad, input_grads)
    return PartialSums(
        products=torch.cat([full[None], of_formats.sub_(full)]),
        per_token=None if is_row else per_token,
        scalars=scalars.float(),
        health=health.float(),
        amax=amax,
    )


def norm_sums(
    operands: Operands,
    *,
    kind: LinearKind,
    num_shards: int,
    formats: Mapping[str, Format],
    stream: StochasticStream,
) -> NormSums:
    """Measure norms on this shard; `measure.norm_sums` has the contract."""
    fmts = tuple(formats.values())
    space = _Workspace.zeros(operands, fmts, products=False)
    _observe_into(None, space, _X, operands, fmts, None)
    _observe_into(None, space, _G, operands, fmts, stream)
    weight = operands.weight
    if weight.observed is None:
        _observe_into(None, space, _W, operands, fmts, None)
        if weight.keeps_copies:
            weight.observed = (space.sums[_W], space.bins[_W], space.amax[_W])
    else:
        _put_weight(space, *weight.observed)
    _, health = _in_order(space, operands, formats, kind, None, num_shards)
    if num_shards > 1:
        health = health.float()  # as a rank that fails adds zeros
    return NormSums(health, space.amax.view(torch.float32))


def _quantized(products: bool) -> tuple[tuple[Operand, Gemm], ...]:
    """Return the operands that are quantized, and for which GEMM."""
    if products:
        return (*OBSERVED, (Operand.WEIGHT, Gemm.DGRAD))
    return OBSERVED[: len(Operand)]


class _Workspace(NamedTuple):
    """What the kernels write beside values, zeros at first; F formats.

    Attributes:
        by_program: FP32 [sums, width], one view of `sums` and `rows`.
        sums: FP32 [OBSERVED and _SCRATCH, F + 1, NUM_SUMS, width], the operand itself last. Of
            norms alone it has only health's operands.
        rows: FP32 [_PRODUCTS, 2 + 2 F, width], as `errors_kernel` writes them. Of norms alone it is
            empty.
        bins: int32 [health's operands, F + 1, NUM_BINS].
        amax: int32 [health's operands], the bits of the largest magnitudes.
    """

    by_program: Tensor
    sums: Tensor
    rows: Tensor
    bins: Tensor
    amax: Tensor

    @classmethod
    def zeros(cls, operands: Operands, formats: tuple[Format, ...], products: bool = True) -> Self:
        """Return zeros, in one operation."""
        quantized = _quantized(products)
        width = 1
        if products:
            width = max(len(operands.input), operands.grad_output_tiles.shape[1])
        for operand, gemm in quantized:
            x = _tensor(operands, operand, gemm)
            for each in _launches(formats, operand, gemm):
                width = max(width, _num_programs(x, each.config))
        num = len(formats)
        shapes = (
            (len(quantized), 1 + num, NUM_SUMS, width),
            (len(_PRODUCTS) if products else 0, 2 + 2 * num, width),
            (len(Operand), 1 + num, NUM_BINS),
            (len(Operand),),
        )
        sizes = [math.prod(shape) for shape in shapes]
        flat = torch.zeros(sum(sizes), dtype=torch.int32, device=operands.input.device)
        parts = [p.view(s) for p, s in zip(flat.split_with_sizes(sizes), shapes, strict=True)]
        by_program = flat[: sizes[0] + sizes[1]].view(torch.float32).view(-1, width)
        sums, rows = (part.view(torch.float32) for part in parts[:2])
        return cls(by_program, sums, rows, *parts[2:])


class _Launch(NamedTuple):
    """A launch of `observe_kernel`.

    Attributes:
        places: which one or two of the formats it quantizes to.
        config: the block of a program.
    """

    places: tuple[int, ...]
    config: LaunchConfig


@lru_cache(maxsize=64)
def _launches(formats: tuple[Format, ...], operand: Operand, gemm: Gemm) -> tuple[_Launch, ...]:
    """Return the launches that observe an operand: two formats each, of the same tensor."""
    by_rotation = defaultdict(list)
    for i, fmt in enumerate(formats):
        by_rotation[fmt.wgrad_hadamard if gemm is Gemm.WGRAD else 0].append(i)
    found = []
    for places in by_rotation.values():
        for first in range(0, len(places), 2):
            pair = tuple(places[first : first + 2])
            blocks = [operand_block(formats[i], operand, gemm) for i in pair]
            rows = max(block[0] for block in blocks)
            cols = max(block[1] for block in blocks)
            base = ROW_CONFIG if rows == 1 else COL_CONFIG if cols == 1 else SQUARE_CONFIG
            config = LaunchConfig(max(base.rows, rows), max(base.cols, cols), base.num_warps)
            found.append(_Launch(pair, config))
    return tuple(found)


def _tensor(operands: Operands, operand: Operand, gemm: Gemm) -> Tensor:
    """Return an operand of a GEMM, before quantization."""
    return operands.weight.source if operand is Operand.WEIGHT else operands.of(operand, gemm)


def _num_programs(x: Tensor, config: LaunchConfig) -> int:
    return math.ceil(x.shape[0] / config.rows) * math.ceil(x.shape[1] / config.cols)


def _observe(
    space: _Workspace,
    which: int,
    operands: Operands,
    formats: tuple[Format, ...],
    stream: StochasticStream | None,
    gemm: Gemm | None = None,
) -> Tensor:
    """Return what a GEMM sees of an operand in each format, [F, rows, cols], and add up the rest.

    The arguments are those of `_observe_into`.
    """
    operand, own_gemm = OBSERVED[which]
    x = _tensor(operands, operand, gemm or own_gemm)
    # The interpreter is compared with PyTorch on a CPU, which multiplies in FP32.
    dtype = torch.float32 if launch.interpreting() else torch.bfloat16
    out = torch.empty((len(formats), *x.shape), dtype=dtype, device=x.device)
    _observe_into(out, space, which, operands, formats, stream, gemm)
    return out


def _observe_into(
    out: Tensor | None,
    space: _Workspace,
    which: int,
    operands: Operands,
    formats: tuple[Format, ...],
    stream: StochasticStream | None,
    gemm: Gemm | None = None,
) -> None:
    """Quantize an operand to each format, and add up errors and health.

    Args:
        out: takes what a GEMM sees, [F, rows, cols]; None where that is not wanted.
        space: takes the sums.
        which: the place in `OBSERVED`.
        operands: the shard's tensors.
        formats: what it is quantized to.
        stream: random numbers of G.
        gemm: dgrad for W as dgrad sees it, of which no sums are made; None is that of `OBSERVED`.
    """
    from megatron_snip.kernels.observe import observe_kernel

    operand, own_gemm = OBSERVED[which]
    slot = which if gemm is None else _SCRATCH
    gemm = gemm or own_gemm
    x = _tensor(operands, operand, gemm)
    has_health = slot < len(Operand)
    for i, (places, config) in enumerate(_launches(formats, operand, gemm)):
        source = rotated(x, formats[places[0]], gemm)
        randoms: list[PhiloxArguments] = []
        specs: list[launch.TileSpec] = []
        numbers: list[Tensor] = []
        for place in places:
            given = operands.amax_or_scale(formats[place], operand, gemm)
            found = prepare(source, formats[place], operand, gemm, stream, given)
            random = philox_arguments(found.stream, x.shape[1])
            randoms.append(random)
            specs.append(launch.tile_spec(found.fmt, found.block, random))
            # Any pointer where there is no number: it is not read.
            numbers.append(source if found.amax_or_scale is None else found.amax_or_scale)
        # Formats that are rounded stochastically take the same numbers.
        random = max(randoms, key=lambda each: each.mode)
        with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
            observe_kernel[(_num_programs(x, config),)](
                source,
                *source.stride(),
                numbers[0],
                numbers[-1],
                *source.shape,
                source if out is None else out,  # any pointer: not written to
                space.sums[slot],
                space.sums.shape[-1],
                space.bins[slot] if has_health else space.bins,
                space.amax[slot] if has_health else space.amax,
                random.key,
                *random.columns,
                places[0],
                places[-1],
                R=config.rows,
                C=config.cols,
                SPEC_0=specs[0],
                SPEC_1=specs[1] if len(specs) > 1 else None,
                ORIGINAL=len(formats) if has_health and i == 0 else None,
                COUNTS=has_health,
                ROW_STRIDE=WEIGHT_STRIDE if operand is Operand.WEIGHT else 1,
                COL_STRIDE=HISTOGRAM_STRIDE,
                STORES=out is not None,
                NATIVE_CASTS=not launch.interpreting(),
                num_warps=config.num_warps,
            )


def _weight(
    space: _Workspace, operands: Operands, formats: tuple[Format, ...]
) -> tuple[Tensor, Tensor]:
    """Return what fprop and dgrad see of W, [F, N, K] each; it is observed for the first sample."""
    weight = operands.weight
    if weight.observed is None:
        of_fprop = _observe(space, _W, operands, formats, None)
        of_dgrad = of_fprop
        if any(fmt.weight_block[0] != fmt.weight_block[1] for fmt in formats):
            of_dgrad = _observe(space, _W, operands, formats, None, Gemm.DGRAD)
        found = (of_fprop, of_dgrad, space.sums[_W], space.bins[_W], space.amax[_W])
        if weight.keeps_copies:
            weight.observed = found
        return of_fprop, of_dgrad
    of_fprop, of_dgrad, *sums = weight.observed
    _put_weight(space, *sums)
    return of_fprop, of_dgrad


def _put_weight(space: _Workspace, sums: Tensor, bins: Tensor, amax: Tensor) -> None:
    """Write what was observed of W for the first sample."""
    width = min(sums.shape[-1], space.sums.shape[-1])  # W's programs fit into either
    space.sums[_W, ..., :width].copy_(sums[..., :width])
    space.bins[_W].copy_(bins)
    space.amax[_W].copy_(amax)


def _products(a: Tensor, a_q: Tensor, b: Tensor, b_q: Tensor) -> tuple[Tensor, Tensor]:
    """Return a @ b, and a_q @ b_q of each format, FP32; as `matmul_fp32`."""
    if launch.interpreting():  # as in `_observe`
        return a.float() @ b.float(), a_q @ b_q
    product = torch.mm(a.to(torch.bfloat16), b.to(torch.bfloat16), out_dtype=torch.float32)
    return product, torch.bmm(a_q, b_q, out_dtype=torch.float32)


def _add_up(
    space: _Workspace,
    gemm: Gemm,
    product: Tensor,
    of_formats: Tensor,
    other: Tensor | None = None,
    row_factor: Tensor | None = None,
) -> None:
    """Write the sums over rows of a product and its errors.

    Args:
        space: takes the sums.
        gemm: which product it is.
        product: P [rows, cols].
        of_formats: that of the quantized operands, [F, rows, cols].
        other: G [rows, cols], of which <G, E> is made; or with `row_factor`, D's factor of columns
            [cols].
        row_factor: D's factor of rows [rows]: then |D * E|^2 is made.
    """
    from megatron_snip.kernels.observe import errors_kernel

    num = len(of_formats)
    rows, cols = product.shape
    out = space.rows[_PRODUCTS.index(gemm)]
    extra = 0
    strides: tuple[int, ...] = (0, 0)
    if other is not None:
        extra = 1 if row_factor is None else 2
        strides = (0, other.stride(0)) if other.dim() == 1 else other.stride()
    power = 1 << (num - 1).bit_length()
    with torch.cuda.device(product.device) if product.is_cuda else nullcontext():
        errors_kernel[(rows,)](
            product,
            of_formats,
            product if other is None else other,  # any pointer: not read
            *strides,
            product if row_factor is None else row_factor,
            0 if row_factor is None else row_factor.stride(0),
            rows,
            cols,
            out,
            out.stride(0),
            F=num,
            POWER=power,
            EXTRA=extra,
            C=max(128, 2048 // power),
            num_warps=4,
        )


def _in_order(
    space: _Workspace,
    operands: Operands,
    formats: Mapping[str, Format],
    kind: LinearKind,
    sensitivity: Sensitivity | None,
    num_shards: int,
) -> tuple[Tensor, Tensor]:
    """Return `PartialSums.scalars` and `.health` of a kind of linear, FP64.

    Of norms alone there are no scalars.
    """
    products = len(space.rows) > 0
    w = operands.weight.source
    of_dgrad = operands.of(Operand.GRAD_OUTPUT, Gemm.DGRAD)
    num_elements = (operands.input.numel(), w.numel(), of_dgrad.numel())
    index, factors, added = _order(
        tuple(formats),
        kind,
        sensitivity is not None,
        num_shards,
        w.shape[0],
        num_elements,
        products,
        w.device,
    )
    sums = torch.cat([space.by_program.sum(1, dtype=torch.float64), space.bins.flatten()])
    ordered = torch.addcmul(added, sums.index_select(0, index), factors)
    num_scalars = len(scalar_names(kind, formats)) if products else 0
    return ordered[:num_scalars], ordered[num_scalars:].view(-1, len(Operand), OPERAND_SUMS)


@lru_cache(maxsize=256)
@torch.inference_mode(False)
def _order(
    names: tuple[str, ...],
    kind: LinearKind,
    has_sensitivity: bool,
    num_shards: int,
    num_weight_rows: int,
    num_elements: tuple[int, ...],
    products: bool,
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what makes scalars and health of the sums: places, factors, and what is added."""
    num = len(names)
    width = 2 + 2 * num

    def of_operand(which: int, fmt: int, number: int) -> int:
        return (which * (1 + num) + fmt) * NUM_SUMS + number

    # As `_Workspace.zeros` lays them out.
    first_row = of_operand(len(_quantized(products)), 0, 0)
    first_bin = first_row + (len(_PRODUCTS) * width if products else 0)

    def of_product(gemm: Gemm, number: int) -> int:
        return first_row + _PRODUCTS.index(gemm) * width + number

    places = {
        "input_square": of_operand(_X, num, ERROR_SQUARE),
        "weight_square": of_operand(_W, num, ERROR_SQUARE),
        "grad_square": of_product(Gemm.FPROP, 0),
        "wgrad_square": of_product(Gemm.WGRAD, 1),
        "input_grad_square": of_product(Gemm.DGRAD, 1),
    }
    for f, name in enumerate(names):
        local = 2 + f + (num if has_sensitivity else 0)
        places |= {
            f"{name}.input_error_square": of_operand(_X, f, ERROR_SQUARE),
            f"{name}.weight_error_square": of_operand(_W, f, ERROR_SQUARE),
            f"{name}.grad_error_square": of_operand(_G_TILES, f, ERROR_SQUARE),
            f"{name}.wgrad_error_square": of_product(Gemm.WGRAD, 2 + f),
            f"{name}.local_square": of_product(Gemm.WGRAD, local),
            f"{name}.input_grad_error_square": of_product(Gemm.DGRAD, 2 + f),
        }
    wanted = scalar_names(kind, names) if products else []
    index = [places[name] for name in wanted]
    factors = [1.0] * len(wanted)
    added = [0.0] * len(wanted)
    # Every shard holds G (row-parallel) or X (column-parallel) in full, as in `measure`.
    replicated = Operand.GRAD_OUTPUT if kind == "row" else Operand.INPUT
    if num_shards > 1 and products:
        tensor = "grad" if kind == "row" else "input"
        for name in (f"{tensor}_square", *(f"{each}.{tensor}_error_square" for each in names)):
            factors[wanted.index(name)] = 1.0 / num_shards
    counted_rows = math.ceil(num_weight_rows / WEIGHT_STRIDE)
    for f in range(1 + num):
        for which, operand in enumerate(Operand):
            share = 1.0 / num_shards if operand is replicated else 1.0
            own_factors = [share] * OPERAND_SUMS
            own_added = [0.0] * OPERAND_SUMS
            if operand is Operand.WEIGHT:
                own_factors[ZEROED] = num_weight_rows / counted_rows
            if f == num:  # of the operand itself: the number of its elements
                own_added[ZEROED] = num_elements[which] * share
            bins = first_bin + (which * (1 + num) + f) * NUM_BINS
            index += [of_operand(which, f, n) for n in (ERROR_SQUARE, ZEROED, SATURATED)]
            index += range(bins, bins + NUM_BINS)
            factors += own_factors
            added += own_added
    fp64 = torch.tensor([factors, added], dtype=torch.float64)
    return to_device(device, torch.tensor(index)), *to_device(device, fp64)

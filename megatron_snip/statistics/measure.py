"""The errors of one linear in each measured format, on a sample of one microbatch's tokens.

For S sampled tokens, K in_features, N out_features, X [S, K], W [N, K], G = dL/dY [S, N], and Q the
quantizer of a format:

    eY = Q(X) Q(W)^T - X W^T        fprop    [S, N]
    eX = Q(G) Q(W) - G W            dgrad    [S, K]
    eW = Q(G)^T Q(X) - G^T X        wgrad    [N, K]

Tiles run along the contraction dimension of each GEMM. So fprop and dgrad are measured on single
tokens drawn at random. wgrad is measured on complete tiles of consecutive tokens, for some of the
output features. Products accumulate in FP32. On a tensor-parallel rank the tensors are shards:
`partial_sums` returns what must be added over the shards, and `totals` makes one vector of it.

`norm_sums` measures norms alone: of X, W and G, and of their errors as health reports them, without
a GEMM. All of them are of the single tokens.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_snip.collectives import sum_over, sum_together
from megatron_snip.formats import Format
from megatron_snip.matmul import matmul_fp32
from megatron_snip.quantizers.quantize import rotated
from megatron_snip.quantizers.stochastic import StochasticStream
from megatron_snip.quantizers.together import GemmOperand, quantize_dequantize_operands
from megatron_snip.statistics.health import OperandCounts, health_sums
from megatron_snip.statistics.operands import (
    Operands,
    TileAmaxes,
    WeightCopies,
    row_norms,
    sums_of_squares,
)
from megatron_snip.statistics.rows import OPERAND_SUMS
from megatron_snip.statistics.sensitivity import Sensitivity
from megatron_snip.topology import LinearKind
from megatron_snip.types import Gemm, Operand

_HEALTH_ERRORS = ("input_error", "weight_error", "grad_error_in_dgrad")
"""The errors of X, W and G that health reports: of X and W as fprop quantizes them, and of G as
dgrad does. (The column `grad_error`, without a GEMM in its name, is the error of G as wgrad
quantizes it; scores of baselines use it.)"""

_HEALTH_SQUARES = ("input_square", "weight_square", "grad_in_dgrad_square")
"""The squares of the same X, W and G."""

_LOSS_CHANGES = ("first", "fisher", "aligned_fisher")
"""The columns that estimate the change of the loss (`FormatStatistics` has the formulas); `totals`
makes them of `PartialSums.per_token`."""


class PartialSums(NamedTuple):
    """What a shard measured, in FP32; all but `amax` add over shards. F formats.

    Attributes:
        products: the products that are complete only after the sum over shards, because the shards
            split their contraction. Row-parallel: [1 + F, S, N], Y and each format's eY.
            Column-parallel: [1 + F, U, K], dX and each format's eX of the U single tokens that
            dgrad is measured on. None where there is one shard, and it has made sums of them.
        per_token: [2 + 2 F, S] |G_t|^2, |Y_t|^2, |eY_t|^2 and <G_t, eY_t>; None where they must be
            made of `products`.
        scalars: sums of squares, in the order of `scalar_names`.
        health: [F + 1, 3 operands, OPERAND_SUMS], the operands in each format, and then before
            quantization (the other way round than in `products`); see `LinearSums.health`.
        amax: [3] the largest magnitudes of this shard's X, W and G; NaN where an element is NaN.
    """

    products: Tensor | None
    per_token: Tensor | None
    scalars: Tensor
    health: Tensor
    amax: Tensor

    def summed(self, group: ProcessGroup) -> Self:
        """All ranks of `group`: return the sums over the shards, in one exchange."""
        own = {n: t for n, t in self._asdict().items() if t is not None and n != "amax"}
        sums = sum_together(list(own.values()), group)
        return self._replace(**dict(zip(own, sums, strict=True)))

    def totals(self, grad_output: Tensor) -> Tensor:
        """Return the sums of the unsharded linear (`totals`), from G [S, N] of this shard."""
        return totals(self, grad_output)

    @classmethod
    def zeros(
        cls,
        kind: LinearKind,
        operands: Operands,
        formats: Mapping[str, Format],
    ) -> Self:
        """Return the zeros that a shard adds if it could not measure."""
        num_tokens, num_outputs = operands.grad_output.shape
        x_of_dgrad = operands.input[operands.of_dgrad]
        num = len(formats)
        zeros = partial(x_of_dgrad.new_zeros, dtype=torch.float32)
        product = (num_tokens, num_outputs) if kind == "row" else x_of_dgrad.shape
        return cls(
            products=zeros((1 + num, *product)),
            per_token=zeros((2 + 2 * num, num_tokens)) if kind == "column" else None,
            scalars=zeros(len(scalar_names(kind, formats))),
            health=zeros((1 + num, len(Operand), OPERAND_SUMS)),
            amax=zeros(len(Operand)),
        )


class _TokenPair(NamedTuple):
    """X and G of sampled tokens in one format, FP32.

    Attributes:
        input: Q(X), [tokens, K].
        grad_output: Q(G), [tokens, output features]. Of single tokens it has only the rows
            that dgrad is measured on, while `input` has all; of tiles both have the same rows.
        original_grad_output: G before it was quantized; for wgrad after the format's Hadamard
            transform, if it has one.
    """

    input: Tensor
    grad_output: Tensor
    original_grad_output: Tensor


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
    """Measure on this shard.

    Args:
        operands: the shard's tensors.
        kind: how the linear is sharded.
        num_shards: the number of shards whose sums will be added.
        formats: what is measured under each name.
        stream: random numbers of G, where a format rounds it stochastically.
        sensitivity: D of the shard; None takes D = 1.
        features: the output features of `grad_output_tiles`.
    """
    tiles_stream = stream.with_column_stride(features.step or 1, operands.weight.source.shape[0])
    if not operands.input.is_cuda:
        # Converted once here; otherwise each product and norm does it. On a GPU the kernels read
        # BF16.
        operands = operands.tokens_as_fp32()
    x = operands.input
    w = operands.weight.tensor
    g = operands.grad_output
    g_of_dgrad = operands.of(Operand.GRAD_OUTPUT, Gemm.DGRAD)
    num = len(formats)
    outputs = x.new_empty((1 + num, x.shape[0], w.shape[0]), dtype=torch.float32)
    input_grads = x.new_empty((1 + num, len(g_of_dgrad), w.shape[1]), dtype=torch.float32)
    outputs[0] = matmul_fp32(x, w.t())
    input_grads[0] = matmul_fp32(g_of_dgrad, w)
    wgrad = matmul_fp32(operands.grad_output_tiles.t(), operands.input_tiles)
    # Norms of rows. Each key is the column that `sums_of_squares` makes of them: it squares them,
    # and adds them up.
    norms = {
        "input_square": row_norms(x),
        "grad_square": row_norms(g),
        "wgrad_square": row_norms(wgrad),
    }
    norms["grad_in_dgrad_square"] = norms["grad_square"][operands.of_dgrad]
    x_counts = OperandCounts(Operand.INPUT)
    g_counts = OperandCounts(Operand.GRAD_OUTPUT)
    amaxes = TileAmaxes()
    for i, (name, fmt) in enumerate(formats.items(), start=1):
        single, tiles, copies = _quantized(
            operands, name, fmt, stream, tiles_stream, amaxes, (x_counts, g_counts)
        )
        torch.sub(matmul_fp32(single.input, copies.fprop.t()), outputs[0], out=outputs[i])
        input_grad = matmul_fp32(single.grad_output, copies.dgrad)
        torch.sub(input_grad, input_grads[0], out=input_grads[i])
        operands.weight.measure_error(name, copies)
        # In place: the products above were the last use of these copies.
        found = {
            "input_error_square": row_norms(single.input.sub_(x)),
            "grad_error_in_dgrad_square": row_norms(
                single.grad_output.sub_(single.original_grad_output)
            ),
        }
        found |= _wgrad_errors(tiles, wgrad, sensitivity, features)
        norms |= {f"{name}.{error}": of_rows for error, of_rows in found.items()}
    if kind == "row":
        # In a column-parallel linear dX is a sum over shards: its square comes later (`totals`).
        norms |= zip(_squares_of("input_grad", formats), row_norms(input_grads), strict=True)
    norms |= operands.weight.norms

    columns = scalar_names(kind, formats)
    health_names = [f"{name}.{error}_square" for name in formats for error in _HEALTH_ERRORS]
    health_names += _HEALTH_SQUARES
    squares = sums_of_squares([norms[name] for name in (*columns, *health_names)])
    scalars = squares[: len(columns)]
    of_health = squares[len(columns) :]
    counts = (x_counts, operands.weight.counts, g_counts)
    health = health_sums(counts, of_health.view(1 + num, len(counts)))
    if num_shards > 1:
        # Every shard holds G (row-parallel) or X (column-parallel) in full, and adds it to the sum
        # over shards. It must count once there.
        replicated = Operand.GRAD_OUTPUT if kind == "row" else Operand.INPUT
        health[:, list(Operand).index(replicated)] /= num_shards
        for name in _squares_of("grad" if kind == "row" else "input", formats):
            scalars[columns.index(name)] /= num_shards

    is_row = kind == "row"
    return PartialSums(
        products=outputs if is_row else input_grads,
        per_token=None if is_row else _token_sums(g, outputs),
        scalars=scalars,
        health=health,
        amax=torch.stack([each.amax for each in counts]),
    )


def _quantized(
    operands: Operands,
    name: str,
    fmt: Format,
    stream: StochasticStream,
    tiles_stream: StochasticStream,
    amaxes: TileAmaxes,
    counts: tuple[OperandCounts, OperandCounts],
) -> tuple[_TokenPair, _TokenPair, WeightCopies]:
    """Quantize the operands to one format.

    Args:
        operands: the shard's tensors.
        name: the name of the format.
        fmt: what they are quantized to.
        stream: random numbers of G of single tokens.
        tiles_stream: random numbers of G of complete tiles.
        amaxes: of the tiles of X and G; kept from format to format.
        counts: count what becomes of X in fprop and of G in dgrad.

    Returns:
        X and G of single tokens, as fprop and dgrad see them; of complete tiles, as wgrad sees
        them; and W.
    """
    entry = partial(_entry, operands, fmt, amaxes)
    x = entry(Operand.INPUT, Gemm.FPROP, stream)
    g = entry(Operand.GRAD_OUTPUT, Gemm.DGRAD, stream)
    x_tiles = entry(Operand.INPUT, Gemm.WGRAD, tiles_stream)
    g_tiles = entry(Operand.GRAD_OUTPUT, Gemm.WGRAD, tiles_stream)
    of_weight = operands.weight.originals(name)
    quantized = quantize_dequantize_operands((x, g, x_tiles, g_tiles, *of_weight), fmt)
    for each, original, values in zip(counts, (x, g), quantized[:2], strict=True):
        each.add(original, fmt, values)
    x_q, g_q, x_tiles_q, g_tiles_q = (q.values for q in quantized[:4])
    single = _TokenPair(x_q, g_q, g.x)
    tiles = _TokenPair(x_tiles_q, g_tiles_q, g_tiles.x)
    return single, tiles, operands.weight.copies(name, of_weight, quantized[4:])


def _entry(
    operands: Operands,
    fmt: Format,
    amaxes: TileAmaxes,
    operand: Operand,
    gemm: Gemm,
    stream: StochasticStream,
) -> GemmOperand:
    """Return X or G as it is quantized to a format for a GEMM."""
    x = rotated(operands.of(operand, gemm), fmt, gemm)
    found = amaxes.of(x, fmt, operand, gemm)
    amax_or_scale = operands.amax_or_scale(fmt, operand, gemm)
    return GemmOperand(x, operand, gemm, found, stream, amax_or_scale)


def _wgrad_errors(
    quantized: _TokenPair, wgrad: Tensor, sensitivity: Sensitivity | None, features: slice
) -> dict[str, Tensor]:
    """Measure wgrad of complete tiles.

    Args:
        quantized: X and G in the format; overwritten.
        wgrad: dW without errors.
        sensitivity: as in `partial_sums`.
        features: as in `partial_sums`.

    Returns:
        {name of the sum of squares that `sums_of_squares` makes of them: row norms of an error}.
    """
    x_q, g_q, g = quantized
    error = matmul_fp32(g_q.t(), x_q).sub_(wgrad)
    norms = {
        "grad_error_square": row_norms(g_q.sub_(g)),
        "wgrad_error_square": row_norms(error),
    }
    local = norms["wgrad_error_square"]
    if sensitivity is not None:
        local = row_norms(error.mul_(sensitivity.col)) * sensitivity.row[features]
    norms["local_square"] = local
    return norms


class NormSums(NamedTuple):
    """The norms that a shard measured; all but `amax` add over shards. F formats.

    Attributes:
        health: [1 + F, 3 operands, OPERAND_SUMS]; see `LinearSums.health`. Its squares are the
            statistics, too: `health_names` has their columns.
        amax: [3] as in `PartialSums`.
    """

    health: Tensor
    amax: Tensor

    def summed(self, group: ProcessGroup) -> Self:
        """All ranks of `group`: return the sums over the shards."""
        return self._replace(health=sum_over(self.health, group))

    def totals(self, grad_output: Tensor) -> Tensor:
        """Return the sums of the unsharded linear over the sampled tokens: `health`, FP64, flat."""
        return self.health.double().flatten()

    @classmethod
    def zeros(cls, operands: Operands, formats: Mapping[str, Format]) -> Self:
        """Return the zeros that a shard adds if it could not measure."""
        zeros = partial(operands.input.new_zeros, dtype=torch.float32)
        shape = (1 + len(formats), len(Operand), OPERAND_SUMS)
        return cls(zeros(shape), zeros(len(Operand)))


def norm_sums(
    operands: Operands,
    *,
    kind: LinearKind,
    num_shards: int,
    formats: Mapping[str, Format],
    stream: StochasticStream,
) -> NormSums:
    """Measure norms on this shard; `partial_sums` has the arguments."""
    if not operands.input.is_cuda:
        operands = operands.tokens_as_fp32()
    weight = operands.weight
    x_counts = OperandCounts(Operand.INPUT)
    g_counts = OperandCounts(Operand.GRAD_OUTPUT)
    amaxes = TileAmaxes()
    norms = {}
    for name, fmt in formats.items():
        x = _entry(operands, fmt, amaxes, Operand.INPUT, Gemm.FPROP, stream)
        g = _entry(operands, fmt, amaxes, Operand.GRAD_OUTPUT, Gemm.DGRAD, stream)
        of_weight = weight.originals(name, with_dgrad=False)
        x_q, g_q, *w_q = quantize_dequantize_operands((x, g, *of_weight), fmt)
        x_counts.add(x, fmt, x_q)
        g_counts.add(g, fmt, g_q)
        weight.measure_error(name, weight.copies(name, of_weight, w_q))
        norms[f"{name}.input_error_square"] = row_norms(x_q.values.sub_(x.x))
        norms[f"{name}.grad_error_square"] = row_norms(g_q.values.sub_(g.x))
    norms["input_square"] = row_norms(operands.input)
    norms["grad_square"] = row_norms(operands.of(Operand.GRAD_OUTPUT, Gemm.DGRAD))
    norms |= weight.norms
    counts = (x_counts, weight.counts, g_counts)
    squares = sums_of_squares([norms[name] for name in health_names(formats)])
    health = health_sums(counts, squares.view(1 + len(formats), len(counts)))
    # Every shard holds G (row-parallel) or X (column-parallel) in full; it must count once.
    replicated = Operand.GRAD_OUTPUT if kind == "row" else Operand.INPUT
    health[:, list(Operand).index(replicated)] /= num_shards
    return NormSums(health, torch.stack([each.amax for each in counts]))


def health_names(formats: Iterable[str]) -> list[str]:
    """Return the columns of `records.py` that the squares in `NormSums.health` are, in order."""
    errors = ("input_error", "weight_error", "grad_error")
    names = [f"{name}.{error}_square" for name in formats for error in errors]
    return [*names, "input_square", "weight_square", "grad_square"]


def total_names(formats: Iterable[str]) -> list[str]:
    """Return the columns of `records.py` that `totals` begins with; of a format `format.column`."""
    names = scalar_names("row", formats) + _squares_of("output", formats)
    return names + [f"{name}.{column}" for column in _LOSS_CHANGES for name in formats]


def totals(sums: PartialSums, grad_output: Tensor) -> Tensor:
    """Return the sums of the unsharded linear over the sampled tokens; nothing is scaled yet.

    Args:
        sums: added over all shards.
        grad_output: G [S, N] of this shard.

    Returns:
        FP64: statistics in the order of `total_names`, then `sums.health`, flat. `fisher` lacks its
        factor T / (2 N), `aligned_fisher` its factor T / 2 and `local_square` its divisor
        |update|^2, with T the tokens of the batch and N the out_features. (`local`: the change of
        the linear's own update, D * eW, and of no other's.)
    """
    values = [sums.scalars]
    per_token = sums.per_token
    if per_token is None:
        assert sums.products is not None
        per_token = _token_sums(grad_output, sums.products)  # Y and eY are complete only now
    elif sums.products is not None:
        by_token = _token_squares(sums.products)
        # Rounded to FP32, as `partial_sums` rounds them for a row-parallel linear: so a linear
        # without shards gives the same bits as either kind.
        values.append(by_token.sum(1, dtype=torch.float64).float())
    num_formats = len(per_token) // 2 - 1
    sizes = [1, 1 + num_formats, num_formats]  # as `_token_sums` puts them together
    grads, outputs, inner_products = torch.split(per_token.double(), sizes)
    by_token = torch.cat(
        [outputs, inner_products, outputs[1:] * grads, inner_products.square()]  # _LOSS_CHANGES
    )
    values += [by_token.sum(1), sums.health.flatten()]
    return torch.cat(values)  # to FP64


def _token_sums(g: Tensor, outputs: Tensor) -> Tensor:
    """Return `PartialSums.per_token` of G [S, N] and (Y, eY of each format) [1 + F, S, N]."""
    inner_products = torch.stack(
        [torch.linalg.vecdot(g.float(), error.float()) for error in outputs[1:]]
    )
    return torch.cat([_token_squares(g)[None], _token_squares(outputs), inner_products])


def scalar_names(kind: LinearKind, formats: Iterable[str]) -> list[str]:
    """Return the names of `PartialSums.scalars`, which are columns of the table.

    A linear without shards may have those of either kind.
    """
    names = ["input_square", "weight_square", "grad_square", "wgrad_square"]
    errors = ("input_error", "weight_error", "grad_error", "wgrad_error", "local")
    names += [f"{name}.{error}_square" for name in formats for error in errors]
    return names + (_squares_of("input_grad", formats) if kind == "row" else [])


def _squares_of(tensor: str, formats: Iterable[str]) -> list[str]:
    """Return the columns of a tensor's square and of each format's error of it."""
    return [f"{tensor}_square", *(f"{name}.{tensor}_error_square" for name in formats)]


def _token_squares(tensor: Tensor) -> Tensor:
    """Return each row's sum of squares, FP32: [.., rows, cols] -> [.., rows]."""
    return row_norms(tensor).square()

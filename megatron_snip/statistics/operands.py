"""What enters the GEMMs of a linear that is measured, and what is measured of W alone.

X and G are of the sampled tokens of one microbatch. W serves the samples of all senders: an expert
has one for each data rank that sent it tokens.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, Self

import torch
from torch import Tensor

from megatron_snip.formats import Block, Format, ScaleType
from megatron_snip.quantizers.quantize import operand_block, operand_format
from megatron_snip.quantizers.reference import tensor_scale, tile_amaxes
from megatron_snip.quantizers.together import GemmOperand, Quantized
from megatron_snip.statistics.health import OperandCounts
from megatron_snip.statistics.sample import constant
from megatron_snip.types import Gemm, Operand


class AmaxesOrScales(NamedTuple):
    """What scales of entire tensors are made from: FP32 [3] each, of X, W and G in this order.

    Attributes:
        amax: the largest magnitudes over all tokens that the GEMM multiplies (an expert's are of
            all senders), and over the ranks that share the scale.
        rotated_amax: the same after the Hadamard transform of wgrad's operands (W has none).
        delayed: the scales of a format with delayed scaling. Without them, those that `amax` would
            give.
    """

    amax: Tensor
    rotated_amax: Tensor
    delayed: Mapping[Format, Tensor]

    def of(self, fmt: Format, operand: Operand, gemm: Gemm) -> Tensor:
        """Return the `amax_or_scale` of an operand: an amax, or for delayed scaling a scale."""
        index = list(Operand).index(operand)
        if fmt.scale is ScaleType.DELAYED:
            if fmt in self.delayed:
                return self.delayed[fmt][index]
            element = operand_format(fmt, operand).element
            assert element is not None
            return tensor_scale(self.amax[index], element)
        is_rotated = gemm is Gemm.WGRAD and fmt.wgrad_hadamard > 0
        return (self.rotated_amax if is_rotated else self.amax)[index]


class TileAmaxes:
    """The largest magnitudes of tiles, computed once for all formats that tile a tensor alike."""

    def __init__(self) -> None:
        """Start with none."""
        self._known: dict[tuple[Operand, Gemm, Block, int], Tensor] = {}

    def of(self, x: Tensor, fmt: Format, operand: Operand, gemm: Gemm) -> Tensor:
        """Return what `tile_amaxes` returns for an operand x, as it is quantized for `gemm`."""
        block = operand_block(fmt, operand, gemm)
        rotation = fmt.wgrad_hadamard if gemm is Gemm.WGRAD else 0
        key = operand, gemm, block, rotation
        if key not in self._known:
            self._known[key] = tile_amaxes(x, block)
        return self._known[key]


class WeightCopies(NamedTuple):
    """W quantized to one format, FP32 [N, K].

    Attributes:
        fprop: what fprop multiplies by.
        dgrad: what dgrad multiplies by; with a square block, the same tensor.
    """

    fprop: Tensor
    dgrad: Tensor


class MeasuredWeight:
    """W of one linear, and what is measured of W alone: once for the samples of all senders.

    Attributes:
        source: W [N, K] of this shard.
        amaxes_or_scales: what scales of entire tensors are made from; None where no format has such
            a scale.
        counts: what became of W in the formats that it was quantized to.
        keeps_copies: whether there are several samples, which share what is computed of W.
        observed: what fused.py keeps for the samples after the first.
    """

    def __init__(
        self,
        weight: Tensor,
        formats: Mapping[str, Format],
        amaxes_or_scales: AmaxesOrScales | None,
        keeps_copies: bool,
    ) -> None:
        """Compute nothing yet.

        Args:
            weight: W [N, K] of this shard.
            formats: what is measured under each name.
            amaxes_or_scales: see the class.
            keeps_copies: whether there are several samples: then the copies of W in all formats
                are held as long as this object. Else only the caller holds them, one format at a
                time.
        """
        self.source = weight
        self._formats = formats
        self.amaxes_or_scales = amaxes_or_scales
        self.keeps_copies = keeps_copies
        self.observed: tuple[Tensor, ...] | None = None
        self._copies: dict[str, WeightCopies] = {}
        self.counts = OperandCounts(Operand.WEIGHT)
        self._amaxes = TileAmaxes()
        self._error_norms: dict[str, Tensor] = {}

    @cached_property
    def tensor(self) -> Tensor:
        """W as it is measured: on a CPU in FP32."""
        return self.source if self.source.is_cuda else self.source.float()

    def originals(self, name: str, with_dgrad: bool = True) -> list[GemmOperand]:
        """Return what must be quantized for `copies` in the format called `name`.

        That is W for each GEMM that needs a copy of its own; nothing if the copies were kept.

        Args:
            name: the name.
            with_dgrad: whether dgrad's copy is wanted; else it is that of fprop.
        """
        if name in self._copies:
            return []
        fmt = self._formats[name]
        block = operand_block(fmt, Operand.WEIGHT, Gemm.FPROP)
        is_square = block[0] == block[1]  # then one copy serves both GEMMs
        gemms = [Gemm.FPROP] if is_square or not with_dgrad else [Gemm.FPROP, Gemm.DGRAD]
        return [self._original(fmt, gemm) for gemm in gemms]

    def copies(
        self, name: str, originals: Sequence[GemmOperand], quantized: Sequence[Quantized]
    ) -> WeightCopies:
        """Return W in the format called `name`.

        Args:
            name: the name.
            originals: what `originals` returned.
            quantized: what they became.
        """
        if not originals:
            return self._copies[name]
        self.counts.add(originals[0], self._formats[name], quantized[0])
        copies = WeightCopies(quantized[0].values, quantized[-1].values)
        if self.keeps_copies:
            self._copies[name] = copies
        return copies

    def measure_error(self, name: str, copies: WeightCopies) -> None:
        """Keep the norms of W's errors in a format.

        Call it after a sample's last use of its copies: it may overwrite them.
        """
        error = f"{name}.weight_error_square"
        if error not in self._error_norms:
            w = self.tensor
            # In place where no other sample needs the copy.
            change = copies.fprop - w if self.keeps_copies else copies.fprop.sub_(w)
            self._error_norms[error] = row_norms(change)

    @cached_property
    def norms(self) -> dict[str, Tensor]:
        """Row norms of W and its errors, by the name of their sum of squares.

        Complete after `measure_error` of all formats.
        """
        return {"weight_square": row_norms(self.tensor)} | self._error_norms

    def _original(self, fmt: Format, gemm: Gemm) -> GemmOperand:
        """Return W as it is quantized for a GEMM."""
        w = self.tensor
        known = self.amaxes_or_scales
        amax_or_scale = None if known is None else known.of(fmt, Operand.WEIGHT, gemm)
        amaxes = self._amaxes.of(w, fmt, Operand.WEIGHT, gemm)
        return GemmOperand(w, Operand.WEIGHT, gemm, amaxes, amax_or_scale=amax_or_scale)


class Operands(NamedTuple):
    """The tensors of a linear on this shard, for the sampled tokens.

    Attributes:
        input: X [S, K], single tokens.
        weight: W [N, K], and what is measured of it alone.
        grad_output: G [S, N], the same tokens.
        of_dgrad: which of these tokens dgrad is measured on.
        input_tiles: X [R, K], the tokens of complete tiles of wgrad. Of norms alone R = 0.
        grad_output_tiles: G [R, N / stride], the same tokens, every `stride`-th output feature.
        amaxes_or_scales: what scales of entire tensors are made from; None where no format has such
            a scale.
    """

    input: Tensor
    weight: MeasuredWeight
    grad_output: Tensor
    of_dgrad: slice
    input_tiles: Tensor
    grad_output_tiles: Tensor
    amaxes_or_scales: AmaxesOrScales | None = None

    def of(self, operand: Operand, gemm: Gemm) -> Tensor:
        """Return X or G of the tokens that `gemm` is measured on."""
        if operand is Operand.INPUT:
            return self.input_tiles if gemm is Gemm.WGRAD else self.input
        if gemm is Gemm.WGRAD:
            return self.grad_output_tiles
        return self.grad_output[self.of_dgrad]

    def tokens_as_fp32(self) -> Self:
        """Return the operands with all tensors but W in FP32."""
        return self._replace(
            input=self.input.float(),
            grad_output=self.grad_output.float(),
            input_tiles=self.input_tiles.float(),
            grad_output_tiles=self.grad_output_tiles.float(),
        )

    def amax_or_scale(self, fmt: Format, operand: Operand, gemm: Gemm) -> Tensor | None:
        """Return what a scale per tensor is made from (`AmaxesOrScales.of`), if it is known."""
        known = self.amaxes_or_scales
        return None if known is None else known.of(fmt, operand, gemm)


def sums_of_squares(norms: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of each matrix from the norms of its rows.

    Returns:
        FP32, one for each matrix; they are summed in FP64.
    """
    squares = torch.cat(list(norms)).square().double()
    lengths = constant(squares.device, tuple(len(of_rows) for of_rows in norms))
    # Its checks of the lengths, which `unsafe` leaves out, would wait for the device.
    sums: Tensor = torch.segment_reduce(squares, "sum", lengths=lengths, unsafe=True)
    return sums.float()


def row_norms(tensor: Tensor) -> Tensor:
    """Return each row's norm, FP32: [.., rows, cols] -> [.., rows]."""
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=-1, dtype=torch.float32)
    return norms

"""Measures the statistics that plugins add (`added.py`) on the sample of one microbatch."""

import logging
from collections.abc import Mapping, MutableMapping

import torch
from torch import Tensor

from megatron_snip.errors import one_line
from megatron_snip.formats import Format
from megatron_snip.log import launched_rank, log_failure
from megatron_snip.quantizers.quantize import rotated
from megatron_snip.quantizers.stochastic import StochasticStream
from megatron_snip.quantizers.together import GemmOperand, quantize_dequantize_operands
from megatron_snip.statistics.added import Statistic
from megatron_snip.statistics.operands import Operands, TileAmaxes
from megatron_snip.statistics.sample import MeasureSettings
from megatron_snip.topology import LinearKind
from megatron_snip.types import Gemm, Operand

logger = logging.getLogger(__name__)

_GEMMS = {
    Operand.INPUT: Gemm.FPROP,
    Operand.WEIGHT: Gemm.FPROP,
    Operand.GRAD_OUTPUT: Gemm.DGRAD,
}
"""The GEMM that quantizes an operand."""


def added_names(settings: MeasureSettings, combine: str) -> list[str]:
    """Return `format.name` of all formats, and of the statistics that combine in one way."""
    return [
        f"{fmt}.{name}"
        for fmt in settings.formats
        for name, each in settings.added.items()
        if each.combine == combine
    ]


def measure_added(
    operands: Operands,
    *,
    kind: LinearKind,
    num_shards: int,
    settings: MeasureSettings,
    stream: StochasticStream,
    failures: MutableMapping[str, str],
) -> tuple[Tensor, Tensor]:
    """Measure on this shard.

    Args:
        operands: the shard's tensors.
        kind: how the linear is sharded.
        num_shards: the number of shards whose sums will be added.
        settings: what is measured.
        stream: random numbers of G, where a format rounds it stochastically.
        failures: gets the first error of each statistic, in one line.

    Returns:
        The sums, which add up over shards, and the maxima: FP32, in the order of `added_names`. NaN
        stands for what failed: it stays one when ranks combine it, so all of them leave it out.
    """
    tensors = {
        Operand.INPUT: operands.input,
        Operand.WEIGHT: operands.weight.tensor,
        Operand.GRAD_OUTPUT: operands.of(Operand.GRAD_OUTPUT, Gemm.DGRAD),
    }
    if not operands.input.is_cuda:  # as the other statistics are measured
        tensors = {operand: tensor.float() for operand, tensor in tensors.items()}
    # Every shard holds G (row-parallel) or X (column-parallel) in full; it must count once.
    replicated = Operand.GRAD_OUTPUT if kind == "row" else Operand.INPUT
    found: dict[str, list[Tensor]] = {"sum": [], "max": []}
    for fmt in settings.formats.values():
        quantized = _quantized(tensors, settings.added, fmt, operands, stream)
        for name, each in settings.added.items():
            value = _value(name, each, tensors[each.operand], quantized[each.operand], failures)
            if each.combine == "sum" and each.operand is replicated:
                value = value / num_shards
            found[each.combine].append(value)
    nothing = operands.input.new_zeros(0, dtype=torch.float32)
    sums, maxima = (torch.stack(values) if values else nothing for values in found.values())
    return sums, maxima


def _quantized(
    tensors: Mapping[Operand, Tensor],
    added: Mapping[str, Statistic],
    fmt: Format,
    operands: Operands,
    stream: StochasticStream,
) -> dict[Operand, Tensor]:
    """Return the operands that statistics read in a format, FP32."""
    amaxes = TileAmaxes()
    entries = {}
    for operand in dict.fromkeys(each.operand for each in added.values()):
        gemm = _GEMMS[operand]
        x = rotated(tensors[operand], fmt, gemm)
        tiles = amaxes.of(x, fmt, operand, gemm)
        of_tensor = operands.amax_or_scale(fmt, operand, gemm)
        random = None if operand is Operand.WEIGHT else stream
        entries[operand] = GemmOperand(x, operand, gemm, tiles, random, of_tensor)
    results = quantize_dequantize_operands(tuple(entries.values()), fmt)
    return {operand: each.values for operand, each in zip(entries, results, strict=True)}


def _value(
    name: str,
    statistic: Statistic,
    original: Tensor,
    quantized: Tensor,
    failures: MutableMapping[str, str],
) -> Tensor:
    """Return the value of a statistic on a shard, FP32 []; NaN if it cannot be computed."""
    if original.numel() == 0:  # an expert without tokens; the maximum of nothing is an error
        nothing = 0.0 if statistic.combine == "sum" else -torch.inf
        return original.new_full((), nothing, dtype=torch.float32)
    try:
        value = statistic.measure(original.float(), quantized)
        return torch.as_tensor(value, dtype=torch.float32, device=original.device).reshape(())
    except Exception as error:  # a plugin's mistake must not end the measurement
        failures.setdefault(name, f"{type(error).__name__}: {one_line(error)}")
        if launched_rank() == 0:
            log_failure(logger, f"statistic '{name}' of a plugin", error)
        return original.new_full((), torch.nan, dtype=torch.float32)

"""Measures the statistics that plugins add (`added.py`) on the sample of one microbatch."""

import logging
from collections.abc import MutableMapping

import torch
from torch import Tensor

from megatron_snip.errors import one_line
from megatron_snip.formats import Format
from megatron_snip.log import launched_rank, log_failure
from megatron_snip.quantizers.quantize import quantize_dequantize_operand
from megatron_snip.quantizers.stochastic import StochasticStream
from megatron_snip.statistics.added import Statistic
from megatron_snip.statistics.operands import MEASURED_IN, Operands
from megatron_snip.statistics.sample import MeasureSettings
from megatron_snip.types import Operand

logger = logging.getLogger(__name__)


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
    settings: MeasureSettings,
    stream: StochasticStream,
    failures: MutableMapping[str, str],
) -> tuple[Tensor, Tensor]:
    """Measure on this shard.

    Args:
        operands: the shard's tensors.
        settings: what is measured.
        stream: random numbers of G, where a format rounds it stochastically.
        failures: gets the first error of each statistic, in one line.

    Returns:
        The sums, which add up over shards, and the maxima: FP32, in the order of `added_names`. NaN
        stands for what failed: it stays one when ranks combine it, so all of them leave it out.
    """
    found: dict[str, list[Tensor]] = {"sum": [], "max": []}
    for fmt in settings.formats.values():
        quantized: dict[Operand, tuple[Tensor, Tensor]] = {}
        for name, each in settings.added.items():
            operand = each.operand
            if operand not in quantized:
                quantized[operand] = _quantized(operands, operand, fmt, stream)
            found[each.combine].append(_value(name, each, *quantized[operand], failures))
    nothing = operands.input.new_zeros(0, dtype=torch.float32)
    sums, maxima = (torch.stack(values) if values else nothing for values in found.values())
    return sums, maxima


def _quantized(
    operands: Operands, operand: Operand, fmt: Format, stream: StochasticStream
) -> tuple[Tensor, Tensor]:
    """Return an operand, and its values in a format, FP32."""
    x = operands.of(operand)
    assert x is not None
    values = quantize_dequantize_operand(
        x,
        fmt,
        operand,
        MEASURED_IN[operand],
        stream=stream,
        amax_or_scale=operands.amax_or_scale(fmt, operand),
        dtype=torch.float32,
    )
    return x.float(), values


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
        value = statistic.measure(original, quantized)
        return torch.as_tensor(value, dtype=torch.float32, device=original.device).reshape(())
    except Exception as error:  # a plugin's mistake must not end the measurement
        failures.setdefault(name, f"{type(error).__name__}: {one_line(error)}")
        if launched_rank() == 0:
            log_failure(logger, f"statistic '{name}' of a plugin", error)
        return original.new_full((), torch.nan, dtype=torch.float32)

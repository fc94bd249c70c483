"""Predicted step time from the seconds that a machine's GEMMs take.

    time = other FLOPs / FLOPs of the linears * seconds(bf16) + sum over linears and options of
           share of the steps * seconds(linear, option)

for the model that the comparison trains, over the same sum with every linear in BF16. Seconds come
from a table of `megatron-snip calibrate`, scaled by FLOPs; they are of GEMMs as training runs them
on that machine, quantization included, so a format that is emulated there may be slower than BF16.
Attention and the output layer, which no table holds, count at the rate of the linears' BF16 GEMMs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from megatron_snip.comparison.gemm_rates import other_flops_per_token
from megatron_snip.options import BF16, Option
from megatron_snip.planning.calibration import CalibrationTable
from megatron_snip.trainer.config import TrainConfig
from megatron_snip.trainer.config import linear_shapes


def measured_step_time(
    options: Mapping[str, Mapping[str, float]], table: CalibrationTable, model: TrainConfig
) -> float:
    """Return the predicted time of a step over that of the same step in BF16; NaN if unknown.

    Args:
        options: by linear of `model`, the share of the steps at each option (`Outcome.options`);
            empty where a run has not kept them.
        table: measured seconds.
        model: whose linears and FLOPs count.

    Raises:
        UsageError: if the table lacks a linear or a format.
    """
    if not options:
        return math.nan
    flops = {shape.name: shape.flops_per_token for shape in linear_shapes(model)}
    bf16 = math.fsum(table.seconds(name, work, BF16) for name, work in flops.items())
    spent = math.fsum(
        share * table.seconds(name, work, Option.parse(option))
        for name, work in flops.items()
        for option, share in options[name].items()
    )
    other = bf16 * other_flops_per_token(model) / math.fsum(flops.values())
    return (other + spent) / (other + bf16)


def check_covers(
    table: CalibrationTable, model: TrainConfig, formats: Iterable[str]
) -> tuple[str, ...]:
    """Refuse a table that cannot predict runs of `model` in these formats and BF16.

    Returns:
        The globs of entries that were measured at other shapes than the linears they stand for.

    Raises:
        UsageError: naming the linear or the format that it lacks.
    """
    others = []
    for shape in linear_shapes(model):
        for name in ("bf16", *formats):
            table.seconds(shape.name, shape.flops_per_token, Option.uniform(name))
        entry = next(e for e in table.linears if fnmatchcase(shape.name, e.names))
        if (entry.out_features, entry.in_features) != (shape.out_features, shape.in_features):
            others.append(entry.names)
    return tuple(dict.fromkeys(others))

"""Statistics made by hand."""

from typing import Any

from megatron_snip.statistics.records import FormatStatistics, LinearStatistics, StatisticsTable


def linear(
    index: int = 0, stage: int = 0, microbatches: float = 2.0, **formats: FormatStatistics
) -> LinearStatistics:
    return LinearStatistics(
        f"decoder.layers.{index}.mlp.linear_fc2",
        stage,
        in_features=512,
        out_features=256,
        flops_per_token=6.0 * 512 * 256,
        microbatches=microbatches,
        tokens=128.0,
        input_square=100.0,
        weight_square=400.0,
        grad_square=25.0,
        formats=formats or {"fp8": errors(1.0), "fp4": errors(16.0)},
    )


def errors(size: float, **changes: Any) -> FormatStatistics:
    """Statistics whose divergences are simple multiples of `size`."""
    values = {
        "input_error_square": 1.0 * size**2,
        "weight_error_square": 4.0 * size**2,
        "grad_error_square": 0.25 * size**2,
    }
    return FormatStatistics(**{**values, **changes})


def table(*linears: LinearStatistics) -> StatisticsTable:
    return StatisticsTable(30, 2.5, linears)

"""Local quantization errors: what the min-abs-err and min-rel-err baselines go by.

    abs_error = sum over the three GEMMs of the Frobenius norms of their operands' errors
    rel_error = the same with each norm divided by the operand's norm

Both are roots of sums over the microbatches measured (SNIP, arXiv:2602.01410, Sec. 5, baselines).
"""

from __future__ import annotations

import math

from megatron_snip.options import Option
from megatron_snip.statistics.records import FormatStatistics, LinearStatistics
from megatron_snip.types import GEMM_OPERANDS, Gemm, Operand


def absolute_error(linear: LinearStatistics, option: Option) -> float:
    """Return the sum over GEMMs and operands of |Q(A) - A|; 0 for bf16.

    Raises:
        KeyError: if one of the option's formats was not measured.
    """
    return sum(math.sqrt(_error_square(linear, option, g, o)) for g, o in _pairs())


def relative_error(linear: LinearStatistics, option: Option) -> float:
    """Return the sum over GEMMs and operands of |Q(A) - A| / |A|; 0 for bf16.

    Raises:
        KeyError: if one of the option's formats was not measured.
    """
    total = 0.0
    for gemm, operand in _pairs():
        error = _error_square(linear, option, gemm, operand)
        norm = _norm_square(linear, operand)
        total += math.sqrt(error / norm) if norm > 0 else 0.0
    return total


def _pairs() -> list[tuple[Gemm, Operand]]:
    return [(gemm, operand) for gemm in Gemm for operand in GEMM_OPERANDS[gemm]]


def _error_square(linear: LinearStatistics, option: Option, gemm: Gemm, operand: Operand) -> float:
    if option[gemm] == "bf16":
        return 0.0
    statistics: FormatStatistics = linear.formats[option[gemm]]
    return {
        Operand.INPUT: statistics.input_error_square,
        Operand.WEIGHT: statistics.weight_error_square,
        Operand.GRAD_OUTPUT: statistics.grad_error_square,
    }[operand]


def _norm_square(linear: LinearStatistics, operand: Operand) -> float:
    return {
        Operand.INPUT: linear.input_square,
        Operand.WEIGHT: linear.weight_square,
        Operand.GRAD_OUTPUT: linear.grad_square,
    }[operand]

"""The row of sums that a linear has in a measurement, and the row of an expert.

A rank adds up the rows of its linears over microbatches; `reduce.py` adds them over ranks, in one
exchange. What stands where in a row is known here and nowhere else:

    linear    statistics (`RowLayout.columns`), weight norms (NUM_NORMS), health sums
    expert    the first ERROR_SUMS of each OPERAND_SUMS health sums

Health sums are OPERAND_SUMS numbers for each format and operand, and after the last format as many
for each operand before quantization.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_snip.kernels.launch import NUM_BINS
from megatron_snip.statistics.records import BASE_COLUMNS, FORMAT_COLUMNS
from megatron_snip.statistics.sensitivity import NUM_NORMS
from megatron_snip.types import Operand

ERROR_SUMS = 3
ERROR_SQUARE, ZEROED, SATURATED = range(ERROR_SUMS)
"""Error square, elements that became zero, elements that saturated. Of the operand before
quantization: its square, the number of its elements, 0."""

OPERAND_SUMS = ERROR_SUMS + NUM_BINS
"""Health sums of one operand in one format: ERROR_SUMS, then the bins of its tiles' scales. Of the
operand before quantization: ERROR_SUMS, then the bins of its elements."""


class LinearSums(NamedTuple):
    """Rows of linears by their parts; F formats.

    Attributes:
        statistics: [.., columns] In the order of `RowLayout.columns`.
        norms: [.., NUM_NORMS] What `sensitivity.weight_norms` returns.
        health: [.., 1 + F, 3 operands, OPERAND_SUMS] The operands before quantization come last.
    """

    statistics: Tensor
    norms: Tensor
    health: Tensor


class RowLayout:
    """What stands where in the rows of a measurement of some formats.

    Attributes:
        columns: Names of a linear's statistics; those of a format are `format.column`.
        width: Number of entries of a linear's row.
        expert_width: Number of entries of an expert's row.
        health_shape: Shape of `LinearSums.health` of one linear.
    """

    def __init__(self, formats: Iterable[str]) -> None:
        """Lay out the rows for the named formats."""
        names = list(formats)
        columns = list(BASE_COLUMNS)
        for name in names:
            columns += [f"{name}.{column}" for column in FORMAT_COLUMNS]
        self.columns = tuple(columns)
        self.health_shape = torch.Size((1 + len(names), len(Operand), OPERAND_SUMS))
        self._expert_shape = torch.Size((1 + len(names), len(Operand), ERROR_SUMS))
        self.width = len(columns) + NUM_NORMS + self.health_shape.numel()
        self.expert_width = self._expert_shape.numel()

    def row(self, statistics: Tensor, health: Tensor) -> Tensor:
        """Return a linear's row; its norms are zeros, because they are no sums of microbatches."""
        norms = statistics.new_zeros(NUM_NORMS)
        return torch.cat([statistics, norms, health.flatten()])

    def expert_row(self, health: Tensor) -> Tensor:
        """Return the row of an expert with these health sums."""
        return health[:, :, :ERROR_SUMS].flatten()

    def split(self, rows: Tensor) -> LinearSums:
        """Return the parts of linears' rows [.., width]; they are views."""
        sizes = [len(self.columns), NUM_NORMS, self.health_shape.numel()]
        statistics, norms, health = torch.split(rows, sizes, dim=-1)
        return LinearSums(statistics, norms, health.view(rows.shape[:-1] + self.health_shape))

    def split_experts(self, rows: Tensor) -> Tensor:
        """Return the sums in experts' rows [.., expert_width]; a view.

        Returns:
            [.., 1 + F, 3 operands, ERROR_SUMS], the operands before quantization last.
        """
        return rows.view(rows.shape[:-1] + self._expert_shape)

"""Table: a problem under a cost model, as arrays. Rows are linears, columns their options.

    n linears, k = the largest number of options; shorter rows are padded (`listed` is False there)

Options are kept by canonical name (`fp4-fp4-fp4` is `fp4`); names that are no options of this
package are kept as they are, so that problems about other things can be solved too.

bf16 is special: it changes nothing, so it may be asked for (by a pin, or by the policies
`uniform-bf16` and `none`) where a problem does not list it. It then has quality loss 0 and saving
0, and the column that holds it is not `listed`: nobody chooses it unasked.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron_snip.errors import UsageError
from megatron_snip.options import BF16
from megatron_snip.planning.cost import TOLERANCE, CostModel, LinearWork, ratio
from megatron_snip.planning.problem import PlanningProblem
from megatron_snip.planning.problem import canonical as canonical  # rooms to the right use it
from megatron_snip.planning.scaling import Scale, choose_scale

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class GainRow:
    """Integer gains of all linears, under one scale a group (the whole model, or each stage).

    Attributes:
        coefficients: [n, k], int64; 0 in padding.
        scales: one a group.
    """

    coefficients: Ints
    scales: tuple[Scale, ...]


@dataclass(frozen=True, eq=False)
class Table:
    """See the file's description.

    Attributes:
        problem: where the numbers come from.
        rate: time saved per gain (`CostModel.rate`).
        options: canonical option names of each linear, by column.
        listed: [n, k], True where the problem lists the option.
        quality: [n, k], quality loss; NaN where forbidden or padded.
        stage: [n], pipeline stage.
        work: base, weight and gains of each linear, exact.
        gains: exact gains by column.
    """

    problem: PlanningProblem
    rate: Fraction
    options: tuple[tuple[str, ...], ...]
    listed: Mask
    quality: Floats
    stage: Ints
    work: tuple[LinearWork, ...]
    gains: tuple[tuple[Fraction, ...], ...]

    @property
    def efficiency_error(self) -> float:
        """How far below its target integer scaling may let an accepted plan's efficiency be."""
        return float(self.overall_row.scales[0].error(len(self.options)) / (self.weight or 1))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the linears, by row."""
        return self.problem.names

    @property
    def num_stages(self) -> int:
        """One more than the largest stage."""
        return self.problem.num_stages

    @property
    def offered(self) -> Mask:
        """[n, k], True where an option is listed and not forbidden."""
        allowed: Mask = self.listed & ~np.isnan(self.quality)
        return allowed

    @cached_property
    def column_of(self) -> tuple[dict[str, int], ...]:
        """Column of each option, by row and canonical name."""
        return tuple({name: j for j, name in enumerate(row)} for row in self.options)

    @cached_property
    def members(self) -> tuple[Ints, ...]:
        """Rows of each stage."""
        return tuple(np.flatnonzero(self.stage == p) for p in range(self.num_stages))

    @cached_property
    def stage_weights(self) -> tuple[Fraction, ...]:
        """Weight of each stage."""
        return tuple(_total(self.work[i].weight for i in rows) for rows in self.members)

    @cached_property
    def stage_bases(self) -> tuple[Fraction, ...]:
        """Time of each stage if nothing is saved."""
        return tuple(_total(self.work[i].base for i in rows) for rows in self.members)

    @cached_property
    def weight(self) -> Fraction:
        """Weight of the whole model."""
        return _total(self.stage_weights)

    @cached_property
    def overall_row(self) -> GainRow:
        """Integer gains under one scale for the whole model."""
        return self._scaled((np.arange(len(self.options)),))

    @cached_property
    def stage_row(self) -> GainRow:
        """Integer gains under one scale a stage."""
        return self._scaled(self.members)

    def stage_gains(self, columns: Sequence[int] | Ints) -> tuple[Fraction, ...]:
        """Return the exact gain of each stage under an assignment ([n] columns)."""
        return tuple(_total(self.gains[i][columns[i]] for i in rows) for rows in self.members)

    def efficiency(self, columns: Sequence[int] | Ints) -> float:
        """Return the efficiency of an assignment over all linears."""
        return ratio(_total(self.stage_gains(columns)), self.weight)

    def stage_efficiencies(self, columns: Sequence[int] | Ints) -> tuple[float, ...]:
        """Return the efficiency of an assignment in each stage."""
        gains = self.stage_gains(columns)
        return tuple(ratio(g, w) for g, w in zip(gains, self.stage_weights, strict=True))

    def quality_loss(self, columns: Sequence[int] | Ints) -> float:
        """Return the sum of quality losses, correctly rounded; NaN if one is unknown."""
        rows = np.arange(len(self.options))
        return math.fsum(self.quality[rows, np.asarray(columns)])

    def columns_of(self, assignment: Sequence[str]) -> Ints:
        """Return the column of each linear's option; -1 where the table has none."""
        found = (
            table.get(name, -1) for table, name in zip(self.column_of, assignment, strict=True)
        )
        return np.fromiter(found, dtype=np.int64, count=len(self.options))

    def _scaled(self, groups: Sequence[Ints]) -> GainRow:
        coefficients = np.zeros(self.listed.shape, dtype=np.int64)
        scales = []
        for rows in groups:
            # Linears of equal shape share one tuple of gains: most of this is done once a shape.
            shapes = {id(self.gains[i]): self.gains[i] for i in rows}
            counts = Counter(id(self.gains[i]) for i in rows)
            distinct = {gain for gains in shapes.values() for gain in gains}
            largest = _total(max(map(abs, gains)) * counts[k] for k, gains in shapes.items())
            scale = choose_scale(tuple(distinct), largest)
            if scale.error(len(rows)) > TOLERANCE * largest:
                raise UsageError(
                    f"{len(rows)} linears whose FLOPs share no unit cannot be planned to "
                    f"{float(TOLERANCE):g}; round the FLOPs to whole numbers"
                )
            integers = {k: [scale.coefficient(gain) for gain in g] for k, g in shapes.items()}
            for i in rows:
                row = integers[id(self.gains[i])]
                coefficients[i, : len(row)] = row
            scales.append(scale)
        return GainRow(coefficients, tuple(scales))


def make_table(problem: PlanningProblem, cost: CostModel, with_bf16: bool = False) -> Table:
    """Build the arrays of a problem.

    Args:
        problem: what is to be decided.
        cost: what efficiency counts.
        with_bf16: give every linear a bf16 column, whether the problem lists it or not.

    Raises:
        UsageError: if the cost model lacks a number.
    """
    work = tuple(cost.work(linear) for linear in problem.linears)
    options, gains = [], []
    shared: dict[tuple[int, tuple[str, ...]], tuple[Fraction, ...]] = {}
    for linear, part in zip(problem.linears, work, strict=True):
        names = tuple(map(canonical, linear.options))
        row = list(part.gains.values())
        if with_bf16 and str(BF16) not in names:
            names = (*names, str(BF16))
            row.append(_unlisted_gain(linear.name, part, cost))
        options.append(names)
        gains.append(shared.setdefault((id(part), names), tuple(row)))
    listed, quality = _arrays(problem, options)
    return Table(
        problem=problem,
        rate=cost.rate,
        options=tuple(options),
        listed=listed,
        quality=quality,
        stage=np.array([linear.stage for linear in problem.linears], dtype=np.int64),
        work=work,
        gains=tuple(gains),
    )


def _unlisted_gain(name: str, work: LinearWork, cost: CostModel) -> Fraction:
    if work.unlisted_bf16 is None:
        raise UsageError(
            f"bf16 is asked for, and the problem lists no bf16 option with seconds for '{name}', "
            f"which cost '{cost.name}' needs; add it to the problem or use cost 'flops'"
        )
    return work.unlisted_bf16


def _arrays(problem: PlanningProblem, options: Sequence[tuple[str, ...]]) -> tuple[Mask, Floats]:
    shape = (len(options), max(map(len, options)))
    listed = np.zeros(shape, dtype=np.bool_)
    quality = np.full(shape, np.nan)
    for i, linear in enumerate(problem.linears):
        listed[i, : len(linear.options)] = True
        losses = [cost.quality_loss for cost in linear.options.values()]
        quality[i, : len(losses)] = [math.nan if loss is None else loss for loss in losses]
        if len(options[i]) > len(losses):
            quality[i, len(losses)] = 0.0  # unlisted bf16
    return listed, quality


def _total(values: Iterable[Fraction]) -> Fraction:
    """Sum exactly; integers are summed apart, which is far faster than rational addition."""
    whole = 0
    rest = Fraction(0)
    for value in values:
        if value.denominator == 1:
            whole += value.numerator
        else:
            rest += value
    return rest + whole

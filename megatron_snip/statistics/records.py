"""What a measurement yields: sums over tokens, microbatches and ranks, as floats.

Units are those of the loss and of the gradient of the batch-mean loss. X, W, Y = X W^T and
G = dL/dY are the tensors of a linear; Q(X), Q(W) and Q(G) are X and W in the tiles of fprop and G
in those of dgrad, in a format.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Self, TypeVar

from pydantic_core import to_jsonable_python

from megatron_snip.files import read_record
from megatron_snip.topology import LinearInfo

SCHEMA_VERSION = 3
"""Rises with each change of the fields: what lacks some of them is refused.

Version 2 also had the errors of products, which are not read. Version 1 had other columns.
"""


Over = Literal["tokens", "weight", "all"]
"""What a measured sum runs over; see `Column`."""


class Column(NamedTuple):
    """How the sums of a statistic are scaled.

    Attributes:
        over: What the sum runs over. `tokens`: sampled tokens. `weight`: measured microbatches, and
            their mean is reported. `all`: everything, not a sample.
        grad_power: The power of G with which the sum grows.
    """

    over: Over = "tokens"
    grad_power: int = 0


@dataclass(frozen=True)
class FormatStatistics:
    """Errors of one linear with its operands in one format.

    A value that is absent is NaN: as 0 it would make options free for the planner.

    Attributes:
        input_error_square: The sum of |Q(X) - X|^2.
        weight_error_square: |Q(W) - W|^2, the mean over experts.
        grad_error_square: The sum of |Q(G) - G|^2.
        added: What plugins measure, by the name of the statistic (`statistics/added.py`); without
            values that are not finite.
    """

    input_error_square: float = math.nan
    weight_error_square: float = math.nan
    grad_error_square: float = math.nan
    added: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class LinearStatistics(LinearInfo):
    """Statistics of one linear (of all experts of a layer together, for a mixture of experts).

    Attributes:
        microbatches: Number of microbatches of the batch, over all data ranks; 0 if none was
            measured. Experts count each microbatch once for every expert.
        tokens: Number of tokens of the batch that the linear multiplied; 0 if none was measured.
        input_square: The sum of |X|^2.
        weight_square: |W|^2; the mean over experts.
        grad_square: The sum of |G|^2.
        formats: The errors in each format, by the format's name.
    """

    microbatches: float = 0.0
    tokens: float = 0.0
    input_square: float = math.nan
    weight_square: float = math.nan
    grad_square: float = math.nan
    formats: dict[str, FormatStatistics] = field(default_factory=dict)


@dataclass(frozen=True)
class StatisticsTable:
    """Statistics of a model, the same on every rank.

    Attributes:
        iteration: The measured iteration.
        loss: Mean loss of that iteration, or None where the model reported none.
        linears: One entry for each linear, in the model's order.
    """

    iteration: int
    loss: float | None
    linears: tuple[LinearStatistics, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain built-in types, with the schema's version.

        A NaN is None there: Megatron compares what ranks save, and a NaN differs from itself.
        """
        plain = to_jsonable_python(self)
        return {"version": SCHEMA_VERSION, **_exchanged(plain, _is_nan, None)}

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Self:
        """Build from what `to_dict` returned.

        Raises:
            UsageError: one line, for another version and for a missing or invalid entry.
        """
        if isinstance(value, dict) and "linears" in value:
            linears = _exchanged(value["linears"], lambda number: number is None, math.nan)
            value = value | {"linears": linears}
        return read_record(cls, value, "statistics", SCHEMA_VERSION, older=2)


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _exchanged(value: Any, is_old: Callable[[Any], bool], new: Any) -> Any:
    """Return plain types with `new` in place of each number that `is_old`."""
    if isinstance(value, dict):
        return {name: _exchanged(part, is_old, new) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_exchanged(part, is_old, new) for part in value]
    return new if is_old(value) else value


FORMAT_COLUMNS = ("input_error_square", "weight_error_square", "grad_error_square")
"""The measured fields of `FormatStatistics`."""

BASE_COLUMNS = ("microbatches", "tokens", "input_square", "weight_square", "grad_square")
"""Those of `LinearStatistics`."""


def named_statistics(linear: LinearStatistics) -> dict[str, float]:
    """Return all that was measured of a linear, by the names of the reduced table."""
    found: dict[str, float] = {name: getattr(linear, name) for name in BASE_COLUMNS}
    for name, errors in linear.formats.items():
        values = {column: getattr(errors, column) for column in FORMAT_COLUMNS} | errors.added
        found |= {f"{name}.{column}": value for column, value in values.items()}
    return found


Row = TypeVar("Row", FormatStatistics, LinearStatistics)

_NOT_AVERAGED = frozenset({"microbatches", "tokens"})
"""What `running_mean` takes from the last measurement."""


def running_mean(
    mean: StatisticsTable | None, new: StatisticsTable, decay: float
) -> StatisticsTable:
    """Return the exponential mean of the statistics after one more measurement.

    Linears that the new measurement did not observe keep their mean. The counts are those of the
    last measurement.

    Args:
        mean: The mean of the measurements so far; None before the first.
        new: The new measurement.
        decay: The weight of `mean`, in [0, 1).
    """
    if mean is None:
        return new
    before = {linear.name: linear for linear in mean.linears}
    linears = tuple(_blend(before.get(row.name), row, decay) for row in new.linears)
    return StatisticsTable(new.iteration, new.loss, linears)


def _blend(old: LinearStatistics | None, new: LinearStatistics, decay: float) -> LinearStatistics:
    if old is None or old.microbatches == 0:
        return new
    if new.microbatches == 0 and new.formats.keys() <= old.formats.keys():
        return replace(old, stage=new.stage)
    if new.microbatches == 0:  # its measurement was in other formats: no plan can use it
        return new
    formats = {}
    for name, values in new.formats.items():
        before = old.formats.get(name, values)
        added = {
            key: _mean(before.added.get(key, value), value, decay)
            for key, value in values.added.items()
        }
        formats[name] = replace(_mixed(before, values, FORMAT_COLUMNS, decay), added=added)
    return replace(_mixed(old, new, BASE_COLUMNS, decay), formats=formats)


def _mixed(old: Row, new: Row, columns: tuple[str, ...], decay: float) -> Row:
    """Return the average of two rows."""
    values: dict[str, Any] = {
        name: _mean(getattr(old, name), getattr(new, name), decay)
        for name in columns
        if name not in _NOT_AVERAGED
    }
    return replace(new, **values)


def _mean(before: float, now: float, decay: float) -> float:
    """Return the average; a NaN now makes it NaN, and one before is forgotten."""
    # Where both are equal, the mean is equal to them; the formula might round it.
    if before == now or not math.isfinite(before):
        return now
    return decay * before + (1 - decay) * now

"""What a measurement yields: sums over tokens, microbatches and ranks, as floats.

Units are those of the loss and of the gradient of the batch-mean loss. X, W, Y = X W^T and
G = dL/dY are the tensors of a linear; eY, eX and eW are the errors of Y, of dX = G W and of
dW = G^T X when the operands of that GEMM are quantized (`measure.py`).
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Self, TypeVar

from pydantic_core import to_jsonable_python

from megatron_snip.files import read_record
from megatron_snip.topology import LinearInfo

SCHEMA_VERSION = 2
"""Rises with each change of the fields: an old checkpoint's table lacks them, so it is refused.

Version 1 had other columns.
"""


Over = Literal["tokens", "dgrad", "tiles", "weight", "all"]
"""What the sum of a measured field runs over; see `Column`."""


class Column(NamedTuple):
    """How the sums of a measured field are scaled.

    Attributes:
        over: What the sum runs over. `tokens`: single sampled tokens. `dgrad`: those of them on
            which dgrad is measured. `tiles`: sampled tiles of consecutive tokens, for sampled
            output features. `weight`: measured microbatches, and their mean is reported. `all`:
            everything, not a sample.
        grad_power: The power of G with which the sum grows.
    """

    over: Over = "tokens"
    grad_power: int = 0


def _column(over: Over = "tokens", grad_power: int = 0) -> Any:
    """Return a dataclass field, 0 by default, that is summed as a `Column` says."""
    return field(default=0.0, metadata={"column": Column(over, grad_power)})


@dataclass(frozen=True)
class FormatStatistics:
    """Errors of one linear with its operands in one format.

    Attributes:
        first: The signed first-order change of the loss: the sum over tokens of <G, eY>.
        fisher: The second-order change of the loss by errors in any direction:
            1/2 sum_t |eY_t|^2 |G_t|^2 T / N.
        aligned_fisher: The second-order change along the errors' own direction:
            1/2 sum_t <G_t, eY_t>^2 T.
        local_square: The change of the linear's own optimizer update: |D * eW|^2 / |update|^2.
        output_error_square: Error of the output of fprop: the sum of |eY|^2.
        input_grad_error_square: Error of the output of dgrad: the sum of |eX|^2.
        wgrad_error_square: Error of the output of wgrad: the sum over microbatches of |eW|^2.
        input_error_square: Error of X in the tiles of fprop: the sum of |Q(X) - X|^2.
        weight_error_square: Error of W in the tiles of fprop: |Q(W) - W|^2, the mean over experts.
        grad_error_square: Error of G in the tiles of wgrad: the sum of |Q(G) - G|^2. Where norms
            alone are measured, in those of dgrad.
        added: What plugins measure, by the name of the statistic (`statistics/added.py`); without
            values that are not finite.
    """

    first: float = _column("tokens", 1)
    fisher: float = _column("tokens", 2)
    aligned_fisher: float = _column("tokens", 2)
    local_square: float = _column("tiles", 2)
    output_error_square: float = _column()
    input_grad_error_square: float = _column("dgrad", 2)
    wgrad_error_square: float = _column("tiles", 2)
    input_error_square: float = _column()
    weight_error_square: float = _column("weight")
    grad_error_square: float = _column("tiles", 2)
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
        output_square: The sum of |Y|^2, without bias.
        grad_square: The sum of |G|^2.
        input_grad_square: The sum of |dX|^2.
        wgrad_square: The sum over microbatches of |dW|^2.
        update_square: |update|^2 of the optimizer's current direction; 0 if it has none.
        formats: The errors in each format, by the format's name.
    """

    microbatches: float = _column("all")
    tokens: float = _column("all")
    input_square: float = _column()
    weight_square: float = _column("weight")
    output_square: float = _column()
    grad_square: float = _column("tokens", 2)
    input_grad_square: float = _column("dgrad", 2)
    wgrad_square: float = _column("tiles", 2)
    update_square: float = _column("all")
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
        return read_record(cls, value, "statistics", SCHEMA_VERSION)


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _exchanged(value: Any, is_old: Callable[[Any], bool], new: Any) -> Any:
    """Return plain types with `new` in place of each number that `is_old`."""
    if isinstance(value, dict):
        return {name: _exchanged(part, is_old, new) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_exchanged(part, is_old, new) for part in value]
    return new if is_old(value) else value


COLUMNS: dict[str, Column] = {
    f.name: f.metadata["column"]
    for record in (LinearStatistics, FormatStatistics)
    for f in dataclasses.fields(record)
    if "column" in f.metadata
}
"""The measured fields."""

FORMAT_COLUMNS: tuple[str, ...] = tuple(
    f.name for f in dataclasses.fields(FormatStatistics) if "column" in f.metadata
)
"""The measured fields of `FormatStatistics`, repeated for each format in the reduced table."""

BASE_COLUMNS: tuple[str, ...] = tuple(name for name in COLUMNS if name not in FORMAT_COLUMNS)
"""The measured fields of `LinearStatistics`, in the order of the reduced table's columns."""


PRODUCT_COLUMNS: frozenset[str] = frozenset(
    {
        "first",
        "fisher",
        "aligned_fisher",
        "local_square",
        "output_error_square",
        "input_grad_error_square",
        "wgrad_error_square",
        "output_square",
        "input_grad_square",
        "wgrad_square",
    }
)
"""The columns that are measured on products; NaN where norms alone are measured."""


def has_products(linears: Iterable[LinearStatistics]) -> bool:
    """Return whether products were measured of any of these linears, and not norms alone."""
    return any(not math.isnan(row.output_square) for row in linears if row.microbatches)


def named_statistics(linear: LinearStatistics) -> dict[str, float]:
    """Return all that was measured of a linear, by the names of the reduced table."""
    found: dict[str, float] = {name: getattr(linear, name) for name in BASE_COLUMNS}
    for name, errors in linear.formats.items():
        values = {column: getattr(errors, column) for column in FORMAT_COLUMNS} | errors.added
        found |= {f"{name}.{column}": value for column, value in values.items()}
    return found


def column_of(name: str) -> Column:
    """Return the column of a name in the reduced table; `fp4.fisher` is a `fisher`."""
    return COLUMNS[name.rpartition(".")[2]]


Row = TypeVar("Row", FormatStatistics, LinearStatistics)

_NOT_AVERAGED = frozenset({"microbatches", "tokens", "first"})
"""What `running_mean` takes from the last measurement."""


def running_mean(
    mean: StatisticsTable | None, new: StatisticsTable, decay: float
) -> StatisticsTable:
    """Return the exponential mean of the statistics after one more measurement.

    Linears that the new measurement did not observe keep their mean. `first` and the counts are
    those of the last measurement: the sign of a first-order term changes from batch to batch.

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

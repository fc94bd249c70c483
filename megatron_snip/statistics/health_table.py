"""What is known of the observed linears' health: values, their order, and a file's schema."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple, Self

from pydantic_core import to_jsonable_python

from megatron_snip.alert_thresholds import HealthMeasure
from megatron_snip.files import Label, read_record
from megatron_snip.formats import lowest_precision
from megatron_snip.options import Option
from megatron_snip.types import Operand

SCHEMA_VERSION = 2
"""Version 1 also had `update_ratio` and `gemm_sqnr_db`."""

NUM_WORST = 10
"""Rows of a table of the worst linears."""


@dataclass(frozen=True)
class OperandHealth:
    """One operand in one format; None where nothing was observed, or where the value is infinite.

    Attributes:
        sqnr_db: Signal over quantization error in dB: 10 log10(|x|^2 / |Q(x) - x|^2).
        underflow: Share of all elements that are not zero and become zero.
        saturated: Share of all elements that are larger than what their tile can hold.
        scale_log2: Least, median and largest log2 of a tile's scale, rounded down.
        worst_expert: The layer's expert with the worst value as (expert, value), by measure.
    """

    sqnr_db: float | None
    underflow: float | None
    saturated: float | None
    scale_log2: tuple[float, float, float] | None
    worst_expert: dict[HealthMeasure, tuple[int, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class LinearHealth:
    """One linear, or all experts of a layer; None where a value was not observed or is infinite.

    Attributes:
        name: Layout-independent name.
        stage: Pipeline stage.
        gradient_norm: |dL/dW| of the batch, before clipping.
        amax: Largest magnitude of each operand, over the sampled tokens.
        operands: Health of each operand in each format, by format and operand.
        histograms: Magnitudes of each operand: k, and the shares of its elements with
            floor(log2(|x|)) = k, k + 1, ...
        gradient_noise: sqrt(3) |eW| / |dL/dW| by format, with an estimate of the error eW of wgrad.
            Above 1 the weight's gradient of the batch is below the noise that wgrad in this format
            adds to it (docs/how-it-works.md).
    """

    name: Label
    stage: int
    gradient_norm: float | None
    amax: dict[Operand, float | None]
    operands: dict[str, dict[Operand, OperandHealth]]
    histograms: dict[Operand, tuple[float, list[float]]] = field(default_factory=dict)
    gradient_noise: dict[str, float | None] = field(default_factory=dict)


class Finding(NamedTuple):
    """One value of a measure.

    Attributes:
        measure: What was measured.
        linear: Name of the linear.
        tensor: An operand (of an expert), or empty for a value of the linear.
        format: Name of the format; empty for a value before quantization.
        value: The value.
    """

    measure: HealthMeasure
    linear: str
    tensor: str
    format: str
    value: float

    def __str__(self) -> str:
        """Return `decoder.layers.3.mlp.linear_fc2 input fp4 0.31`."""
        words = (self.linear, self.tensor, self.format, f"{self.value:.4g}")
        return " ".join(word for word in words if word)


@dataclass(frozen=True)
class HealthTable:
    """health/<iteration>.json: the observed linears in model order, the same on every rank."""

    iteration: int
    linears: tuple[LinearHealth, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain built-in types, with the schema's version."""
        return {"version": SCHEMA_VERSION, **to_jsonable_python(self)}

    @classmethod
    def from_dict(cls, value: Any, source: str = "health file") -> Self:
        """Build from what `to_dict` returned.

        Raises:
            UsageError: one line that names `source`, for another version and for bad entries.
        """
        return read_record(cls, value, source, SCHEMA_VERSION, older=1)

    @property
    def lowest(self) -> str | None:
        """The format with the fewest bits; None if no linear was observed."""
        names = tuple(dict.fromkeys(name for linear in self.linears for name in linear.operands))
        return lowest_precision(names).name if names else None

    def summary(self) -> dict[str, float]:
        """Return {`underflow/input/worst`: value, ...}, 14 numbers of the lowest format."""
        found = {}
        measures: tuple[HealthMeasure, ...] = ("sqnr_db", "underflow", "gradient_noise")
        for measure in measures:
            findings = self.findings(measure, self.lowest)
            for tensor in dict.fromkeys(("", *Operand)):
                values = [each.value for each in findings if each.tensor == tensor]
                if values:
                    name = series_name(measure, tensor)
                    found[f"{name}/worst"] = values[0]
                    found[f"{name}/median"] = median(values)
        return found

    def gradient_noise(self, linears: Mapping[str, Option]) -> float | None:
        """Return sqrt(3 sum |eW|^2 / sum |dL/dW|^2) over the linears, in the formats of a plan.

        Args:
            linears: the option of each linear, by name. In bf16 eW is 0.

        Returns:
            None if no linear has a gradient.
        """
        noise = 0.0
        gradient = 0.0
        for linear in self.linears:
            norm = linear.gradient_norm
            if norm is None or linear.name not in linears:
                continue
            gradient += norm**2
            noise += (norm * (linear.gradient_noise.get(linears[linear.name].wgrad) or 0.0)) ** 2
        return math.sqrt(noise / gradient) if gradient > 0 else None

    def worst(self, most: int | None = NUM_WORST) -> list[Finding]:
        """Return `most` findings of each measure; None returns all.

        Those that are 0 are left out of the `most`, unless small values are bad.
        """
        worst: list[Finding] = []
        for measure in MEANINGS:
            findings = self.findings(measure)
            if most is None:
                worst += findings
            else:
                worst += [each for each in findings[:most] if each.value or measure in SMALL_IS_BAD]
        return worst

    def beyond(self, measure: HealthMeasure, sign: float, limit: float) -> list[Finding]:
        """Return each linear's value that is farthest above `limit` (`sign` 1) or below it (-1).

        The farthest one comes first.
        """
        found: dict[str, Finding] = {}
        for each in sorted(self.findings(measure), key=lambda one: -sign * one.value):
            if sign * (each.value - limit) > 0:
                found.setdefault(each.linear, each)
        return list(found.values())

    def findings(self, measure: HealthMeasure, fmt: str | None = None) -> list[Finding]:
        """Return a measure's known values, worst first; `fmt` leaves out other formats'."""
        found = []
        for linear in self.linears:
            for each, linear_name, tensor, own_format, value in _values(linear):
                if each == measure and value is not None and fmt in (None, own_format):
                    found.append(Finding(each, linear_name, tensor, own_format, value))
        return sorted(found, key=lambda each: each.value, reverse=measure not in SMALL_IS_BAD)


def _values(linear: LinearHealth) -> Iterator[tuple[HealthMeasure, str, str, str, float | None]]:
    """Yield the fields of a `Finding` for each value of a linear; the value may be None."""
    for name, operands in linear.operands.items():
        for operand, health in operands.items():
            spread = None
            if health.scale_log2 is not None:
                least, _, largest = health.scale_log2
                spread = largest - least
            yield "sqnr_db", linear.name, str(operand), name, health.sqnr_db
            yield "underflow", linear.name, str(operand), name, health.underflow
            yield "saturated", linear.name, str(operand), name, health.saturated
            yield "scale_spread", linear.name, str(operand), name, spread
            for measure, (expert, worst) in health.worst_expert.items():
                yield measure, linear.name, f"{operand} of expert {expert}", name, worst
    for operand, amax in linear.amax.items():
        yield "amax", linear.name, str(operand), "", amax
    for name, noise in linear.gradient_noise.items():
        yield "gradient_noise", linear.name, "", name, noise
    yield "gradient_norm", linear.name, "", "", linear.gradient_norm


SMALL_IS_BAD = ("sqnr_db",)
"""Measures of which a small value is bad; of the others, a large one."""

MEANINGS: dict[HealthMeasure, str] = {
    "sqnr_db": "signal over quantization error of an operand, dB; 6 dB less is twice the error",
    "underflow": "share of the elements that become zero",
    "saturated": "share of the elements that are larger than what their tile can hold",
    "scale_spread": "log2 of the largest over the least scale of a tile",
    "amax": "largest magnitude",
    "gradient_norm": "norm of the weight's gradient, before clipping",
    "gradient_noise": "sqrt(3) times the error of wgrad over the weight's gradient; 1 is too much",
}
"""Each measure in a few words; docs/glossary.md defines it."""


def series_name(measure: str, tensor: str) -> str:
    """Return `underflow/input`, the part of a series' name below `snip/health/`."""
    return f"{measure}/{tensor}" if tensor else measure

"""CalibrationTable: measured seconds per GEMM and format, and the seconds of a problem's options.

The file, schema version 1:

    {"version": 1, "machine": str, "device": str, "date": str, "versions": {package: str},
     "tokens": int,
     "linears": [{"names": GLOB, "out_features": int, "in_features": int,
                  "seconds": {FORMAT: {"fprop": number, "dgrad": number, "wgrad": number}},
                  "tokens": int (optional), "mixed_s": number (optional)}]}

A linear of a problem takes the first entry whose glob matches its name. Seconds are measured at
`tokens` tokens (the entry's, else the table's), for 6 * tokens * out_features * in_features FLOPs;
they are scaled to the linear's own FLOPs, so that a problem may count FLOPs for one token or for a
batch. An option with more than one format takes `mixed_s` seconds beside its GEMMs.
"""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, field_validator

from megatron_snip.errors import UsageError
from megatron_snip.files import Label, read_json, read_record
from megatron_snip.formats import FORMATS
from megatron_snip.options import Option
from megatron_snip.planning.plan import StageAndFlops
from megatron_snip.planning.problem import STRICT, LinearChoices, OptionCost, PlanningProblem
from megatron_snip.types import Gemm, glob_matches

_Count = Annotated[int, Field(ge=1, le=10**15)]
# Sums and products of seconds must stay far from a double's overflow. Up to 0.2.0, 1e-9 stood for
# what could not be measured.
_Seconds = Annotated[float, Field(gt=1e-9, le=1e9)]


class CalibratedLinear(BaseModel):
    """Seconds of linears of one shape.

    Attributes:
        names: Glob over the linears' names, such as `*.mlp.linear_fc1`.
        out_features: Number of output features N.
        in_features: Number of input features K.
        seconds: Measured seconds by format and GEMM.
        tokens: Number of tokens of the measurement; None takes the table's.
        mixed_s: Seconds that an option with more than one format takes beside its GEMMs.
    """

    model_config = STRICT

    names: Annotated[str, Field(min_length=1)]
    out_features: _Count
    in_features: _Count
    seconds: dict[Label, dict[Label, _Seconds]]
    tokens: _Count | None = None
    mixed_s: Annotated[float, Field(ge=0.0, le=1e9)] = 0.0

    @field_validator("seconds")
    @classmethod
    def _complete(cls, value: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
        for name, by_gemm in value.items():
            if name not in FORMATS:
                raise ValueError(f"unknown format '{name}'")
            if set(by_gemm) != {gemm.value for gemm in Gemm}:
                raise ValueError(f"format '{name}' needs seconds for fprop, dgrad and wgrad")
        return value


class CalibrationTable(BaseModel):
    """See the file's description."""

    model_config = STRICT

    version: Literal[1] = 1
    machine: Label
    device: Label
    date: Label
    versions: dict[Label, Label]
    tokens: _Count
    linears: Annotated[tuple[CalibratedLinear, ...], Field(min_length=1, strict=False)]

    def has(self, linear: str, option: Option) -> bool:
        """Whether there are seconds for all GEMMs of a linear under an option."""
        entry = self._entry(linear)
        return entry is not None and set(option.formats) <= entry.seconds.keys()

    def _entry(self, linear: str) -> CalibratedLinear | None:
        matching = (each for each in self.linears if glob_matches(linear, each.names))
        return next(matching, None)

    def seconds(self, linear: str, flops: float, option: Option) -> float:
        """Return the time of a linear's three GEMMs under an option.

        Args:
            linear: Layout-independent name of the linear.
            flops: FLOPs of its three GEMMs together.
            option: Formats of the three GEMMs.

        Raises:
            UsageError: if no entry matches the linear or a format was not measured.
        """
        entry = self._entry(linear)
        if entry is None or not set(option.formats) <= entry.seconds.keys():
            raise UsageError(
                f"the calibration table has no seconds for '{option}' of '{linear}'; measure them "
                "with megatron-snip calibrate"
            )
        measured = sum(entry.seconds[option[gemm]][gemm.value] for gemm in Gemm)
        # Under several formats Transformer Engine does not fuse the norm with quantizing, and does
        # not swizzle scales in advance.
        if len(set(option.formats)) > 1:
            measured += entry.mixed_s
        tokens = entry.tokens or self.tokens
        # 6: three GEMMs of a multiplication and an addition for each of tokens x N x K.
        return measured * flops / (6.0 * tokens * entry.out_features * entry.in_features)

    def slowest_stage(self, linears: Mapping[str, Option], stage_and_flops: StageAndFlops) -> float:
        """Return the seconds of the slowest pipeline stage's linears under an assignment.

        They are the seconds of one GPU for the FLOPs in `stage_and_flops` (those of one token).
        Where GPUs share a linear, their seconds are added.
        """
        stages: dict[int, float] = defaultdict(float)
        for name, option in linears.items():
            stage, flops = stage_and_flops[name]
            stages[stage] += self.seconds(name, flops, option)
        return max(stages.values())


def read_calibration(path: Path) -> CalibrationTable:
    """Read a table.

    Raises:
        UsageError: if the file is missing, not JSON, or breaks the schema; one line.
    """
    value = read_json(path, "calibration table")
    return read_record(CalibrationTable, value, f"calibration table '{path}'")


def with_seconds(problem: PlanningProblem, table: CalibrationTable) -> PlanningProblem:
    """Return the problem with every option's seconds taken from a table.

    Raises:
        UsageError: if the table lacks a linear or a format, or an option is unknown.
    """

    def timed(row: LinearChoices) -> dict[str, OptionCost]:
        options = {}
        for name, cost in row.options.items():
            seconds = table.seconds(row.name, row.flops, Option.parse(name))
            options[name] = cost.model_copy(update={"seconds": seconds})
        return options

    return problem.with_options(timed)

"""PlanningProblem: the linears of a model and what each of their options costs and saves.

The file, schema version 2, holds exactly these keys:

    {"version": 2,
     "linears": [{"name": str, "stage": int, "flops": number,
                  "options": {OPTION: {"quality_loss": number | null, "saving": number,
                                       "seconds": number (optional),
                                       "scores": {NAME: number | null} (optional)}},
                  "statistics": {NAME: number | null} (optional)}],
     "target": number,
     "stage_layers": [[{LAYER: number}, ...], ...] (optional; see `planning/stage_layers.py`),
     "ties": [[NAME, ...], ...] (optional),
     "pins": [[GLOB, OPTION], ...] (optional)}

A run writes one such file at every refresh. Version 1 lacks `stage_layers`; it is still read.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from megatron_snip.errors import UsageError, naming_field
from megatron_snip.files import Label, read_json, read_record, write_atomic
from megatron_snip.options import Option
from megatron_snip.planning.stage_layers import MAX_STAGE, StageLayers
from megatron_snip.types import Gemm, Operand

STRICT = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
"""How records of files are read."""

MAX_MAGNITUDE = 1e150
"""Largest number in a problem: sums over linears must stay far from a double's overflow."""

_Magnitude = Annotated[float, Field(ge=-MAX_MAGNITUDE, le=MAX_MAGNITUDE)]
_NonNegative = Annotated[float, Field(ge=0.0, le=MAX_MAGNITUDE)]
_Tie = Annotated[tuple[str, ...], Field(min_length=2, strict=False)]
_Pin = Annotated[tuple[Label, Label], Field(strict=False)]
_Share = Annotated[float, Field(ge=0.0, le=1.0)]

parse_option = lru_cache(maxsize=4096)(Option.parse)


SQUARES = {
    Operand.INPUT: ("input_error_square", "input_square"),
    Operand.WEIGHT: ("weight_error_square", "weight_square"),
    Operand.GRAD_OUTPUT: ("grad_error_square", "grad_square"),
}
"""The statistics of an operand: the square of its error in a format, and its own square."""


def norms_score(gemm: Gemm) -> str:
    """Return the name of the score that bounds a GEMM's error by Frobenius norms."""
    return f"norms_{gemm.value}"


class OptionCost(BaseModel):
    """The cost and the saving of one option at one linear.

    Attributes:
        quality_loss: Q[l, q], dimensionless; smaller is better; None forbids the option.
        saving: Share in [0, 1] of the linear's FLOPs in the lowest precision.
        seconds: Time of the linear's three GEMMs under the option; None if unknown.
        scores: Numbers that baseline policies compare, by name, such as `abs_error`
            (`quality_loss.planning_problem` makes them); None for a value that was not finite.
    """

    model_config = STRICT

    quality_loss: _Magnitude | None
    saving: _Share
    seconds: _NonNegative | None = None
    scores: dict[Label, float | None] = {}


class LinearChoices(BaseModel):
    """One linear and its options.

    Raises:
        pydantic.ValidationError: if a name is not printable, an option is unknown, or one option
            has two spellings.

    Attributes:
        name: The unique name, such as `decoder.layers.17.mlp.linear_fc1`.
        stage: Pipeline stage, 0-based.
        flops: Floating-point operations of the three GEMMs together; only ratios matter.
        options: Costs by name of the option, such as `fp4` or `fp4-fp8-bf16`, in its shortest
            spelling; there is at least one.
        statistics: What was measured of the linear (`statistics.records.named_statistics`), such as
            `input_square`; of a format `fp4.input_error_square`. None for a value that was not
            finite.
    """

    model_config = STRICT

    name: Annotated[Label, Field(min_length=1)]
    stage: Annotated[int, Field(ge=0, le=MAX_STAGE)]
    flops: _NonNegative
    options: Annotated[dict[str, OptionCost], Field(min_length=1)]
    statistics: dict[Label, float | None] = {}

    @field_validator("options")
    @classmethod
    def _spell(cls, options: dict[str, OptionCost]) -> dict[str, OptionCost]:
        try:
            spelled = {str(parse_option(name)): cost for name, cost in options.items()}
        except UsageError as error:
            raise ValueError(str(error)) from None
        if len(spelled) < len(options):
            raise ValueError(f"an option is listed under two spellings: {', '.join(options)}")
        return spelled


class PlanningProblem(BaseModel):
    """A problem for the planner; see the file's description.

    Raises:
        UsageError: if two linears have the same name, a pin's option is unknown, or `stage_layers`
            has another stage for a linear.

    Attributes:
        version: Version of the file's schema.
        linears: The linears, in the order in which plans and tables list them.
        target: The least efficiency of a plan, in [0, 1].
        stage_layers: Which layers each pipeline stage holds; None if that is not known.
        ties: Names of linears that must have the same option, in groups of two or more.
        pins: (glob, option) pairs: the pins of the run that wrote the problem. `make_plan` uses
            those of its settings only; `megatron-snip plan` and `pareto` add these.
    """

    model_config = STRICT

    version: Literal[2] = 2
    linears: Annotated[tuple[LinearChoices, ...], Field(min_length=1, strict=False)]
    target: _Share
    stage_layers: StageLayers | None = None
    ties: Annotated[tuple[_Tie, ...], Field(strict=False)] = ()
    pins: Annotated[tuple[_Pin, ...], Field(strict=False)] = ()

    @model_validator(mode="after")
    def _check_pins(self) -> Self:
        with naming_field("pins"):
            for _, option in self.pins:
                parse_option(option)
        return self

    @model_validator(mode="after")
    def _check_ties(self) -> Self:
        tied = [name for names in self.ties for name in names]
        for name, count in Counter(tied).items():
            if name not in self.names:
                raise UsageError(f"ties: '{name}' is no linear")
            if count > 1:
                raise UsageError(f"ties: '{name}' is tied twice")
        return self

    @model_validator(mode="after")
    def _check_unique(self) -> Self:
        for name, count in Counter(self.names).items():
            if count > 1:
                raise UsageError(f"linear '{name}' is listed twice")
        return self

    @model_validator(mode="after")
    def _check_stages(self) -> Self:
        if self.stage_layers is None:
            return self
        places = self.stage_layers.local_names(self.names)
        for linear in self.linears:
            stage, _ = places[linear.name]
            if stage != linear.stage:
                raise UsageError(
                    f"'{linear.name}' is on stage {linear.stage}; stage_layers has its layer on "
                    f"stage {stage}"
                )
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the linears, in order."""
        return tuple(linear.name for linear in self.linears)

    @property
    def num_stages(self) -> int:
        """One more than the largest stage."""
        return 1 + max(linear.stage for linear in self.linears)

    def with_options(self, options: Callable[[LinearChoices], dict[str, OptionCost]]) -> Self:
        """Return the problem with other options.

        Args:
            options: given a linear, returns the options that it gets, by name.
        """
        linears = [row.model_copy(update={"options": options(row)}) for row in self.linears]
        return self.model_copy(update={"linears": tuple(linears)})

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of the file."""
        return {"version": self.version, **self.model_dump(mode="json", exclude_defaults=True)}

    def json_lines(self) -> Iterator[str]:
        """Yield the JSON object of the file in pieces, one linear each; `to_dict` has the same."""
        # `model_dump_json` of the model would hold the interpreter lock until it is done, and with
        # it the training thread, beside which the solver's thread sends a request.
        head = f'"version": {self.version}, "target": {json.dumps(self.target)}, '
        if self.stage_layers is not None:
            head += f'"stage_layers": {self.stage_layers.model_dump_json()}, '
        if self.ties:
            head += f'"ties": {json.dumps(self.ties)}, '
        if self.pins:
            head += f'"pins": {json.dumps(self.pins)}, '
        yield f'{{{head}"linears": ['
        separator = ""
        for linear in self.linears:
            yield separator + "\n " + linear.model_dump_json(exclude_defaults=True)
            separator = ","
        yield "\n]}\n"

    @classmethod
    def from_dict(cls, value: Any, source: str = "problem") -> Self:
        """Build from a parsed JSON object.

        Raises:
            UsageError: one line that names `source`, the place, what was got and what is wanted.
        """
        return read_record(cls, value, source, version=2, older=1)


def read_problem(path: Path) -> PlanningProblem:
    """Read a problem file.

    Raises:
        UsageError: if the file is missing, not JSON, or breaks the schema; one line.
    """
    if path.is_dir():
        raise UsageError(
            f"'{path}' is a folder; name a file, such as a run's problems/<iteration>.json"
        )
    value = read_json(path, "problem file")
    if isinstance(value, dict) and "iteration" in value:  # a problem is of no iteration
        raise UsageError(
            f"'{path}' is a plan or a measurement, and a problem is wanted: "
            "problems/<iteration>.json"
        )
    return PlanningProblem.from_dict(value, f"problem file '{path}'")


def write_problem(problem: PlanningProblem, path: Path) -> None:
    """Write a problem file atomically, one linear a line.

    Raises:
        OSError: if it cannot be written.
    """
    write_atomic(path, "".join(problem.json_lines()))

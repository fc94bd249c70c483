"""PlanningProblem: what is to be decided, as a file and as a record.

The file, schema version 1, holds exactly these keys:

    {"version": 1,
     "linears": [{"name": str, "stage": int, "flops": number,
                  "options": {OPTION: {"quality_loss": number | null, "saving": number,
                                       "seconds": number (optional)}}}],
     "target": number}

`quality_loss` is Q[l, q] of the design: the smaller, the less the option hurts training; null
forbids the option. `saving` is the share of the linear's FLOPs that the option runs in the lowest
precision. `stage` is the pipeline stage. A run writes one such file at every refresh.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from megatron_snip.config import explain
from megatron_snip.errors import UsageError
from megatron_snip.files import read_json, write_atomic
from megatron_snip.options import Option

MAX_STAGE = 9999
"""Largest pipeline stage; a plan lists every stage up to the largest."""

# Sums over linears must stay far from a double's overflow.
_Magnitude = Annotated[float, Field(ge=-1e150, le=1e150)]
_NonNegative = Annotated[float, Field(ge=0.0, le=1e150)]
_Share = Annotated[float, Field(ge=0.0, le=1.0)]

_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


@lru_cache(maxsize=4096)
def canonical(name: str) -> str:
    """Return the shortest spelling of an option; a name that is no option is returned as it is."""
    try:
        return str(Option.parse(name))
    except UsageError:
        return name


@lru_cache(maxsize=4096)
def _fault_of_options(names: tuple[str, ...]) -> str:
    """Return what is wrong with the names of a linear's options, or nothing."""
    for name in names:
        if not name.isprintable():
            return f"has an option {name!r}, whose name is not printable"
    if len(set(map(canonical, names))) < len(names):
        return f"lists an option under two spellings: {', '.join(names)}"
    return ""


class OptionCost(BaseModel):
    """What one option does to one linear.

    Attributes:
        quality_loss: Q[l, q], dimensionless; None forbids the option.
        saving: share in [0, 1] of the linear's FLOPs in the lowest precision.
        seconds: time of the linear's three GEMMs under the option, where it is known.
    """

    model_config = _STRICT

    quality_loss: _Magnitude | None
    saving: _Share
    seconds: _NonNegative | None = None


class LinearChoices(BaseModel):
    """One linear: where it runs, how much work it is, and what it can choose from.

    Raises:
        UsageError: if a name is not printable, or one option is listed under two spellings.

    Attributes:
        name: unique, e.g. `decoder.layers.17.mlp.linear_fc1`.
        stage: pipeline stage, 0-based.
        flops: floating-point operations of the three GEMMs together; only ratios matter.
        options: by name, e.g. `fp4` or `fp4-fp8-bf16`; at least one.
    """

    model_config = _STRICT

    name: Annotated[str, Field(min_length=1)]
    stage: Annotated[int, Field(ge=0, le=MAX_STAGE)]
    flops: _NonNegative
    options: Annotated[dict[str, OptionCost], Field(min_length=1)]

    @model_validator(mode="after")
    def _check_names(self) -> LinearChoices:
        if not self.name.isprintable():  # tables and logs show it on terminals
            raise UsageError(f"the name {self.name!r} of a linear is not printable")
        fault = _fault_of_options(tuple(self.options))
        if fault:
            raise UsageError(f"'{self.name}' {fault}")
        return self


class PlanningProblem(BaseModel):
    """The whole problem; see the file's description above.

    Attributes:
        version: of the schema.
        linears: in the order in which plans and tables list them.
        target: least efficiency in [0, 1].
    """

    model_config = _STRICT

    version: Literal[1] = 1
    linears: Annotated[tuple[LinearChoices, ...], Field(min_length=1)]
    target: _Share

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the linears, in order."""
        return tuple(linear.name for linear in self.linears)

    @property
    def num_stages(self) -> int:
        """One more than the largest stage."""
        return 1 + max(linear.stage for linear in self.linears)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of the file; absent seconds are left out."""
        return {
            "version": self.version,
            "linears": [_linear_dict(linear) for linear in self.linears],
            "target": self.target,
        }

    @classmethod
    def from_dict(cls, value: Any, source: str = "problem") -> PlanningProblem:
        """Build from a parsed JSON object.

        Raises:
            UsageError: one line that names `source`, the place, what was got and what is wanted.
        """
        value = _checked_version(value, source)
        linears = value.get("linears")
        if linears == []:
            raise UsageError(f"{source}: 'linears' is empty; it must list at least one linear")
        if isinstance(linears, list):
            value = {**value, "linears": tuple(linears)}
        try:
            problem = cls.model_validate(value)
        except ValidationError as error:
            raise UsageError(f"{source}: {_with_name(explain(error), linears)}") from None
        except UsageError as error:
            raise UsageError(f"{source}: {error}") from None
        _refuse_duplicates(problem.names, source)
        return problem


def read_problem(path: Path) -> PlanningProblem:
    """Read a problem file.

    Raises:
        UsageError: if the file is missing, not JSON, or breaks the schema; one line.
    """
    return PlanningProblem.from_dict(read_json(path, "problem file"), f"problem file '{path}'")


def check_options(problem: PlanningProblem, source: str = "problem") -> None:
    """Refuse names that are no options of this package (a frontier needs no meaning, a plan does).

    Args:
        problem: whose options' names are read.
        source: how error messages call it.

    Raises:
        UsageError: naming `source`, the linear and the option.
    """
    known: set[str] = set()
    for linear in problem.linears:
        for name in linear.options:
            if name in known:
                continue
            try:
                Option.parse(name)
            except UsageError as error:
                raise UsageError(f"{source}: linear '{linear.name}': {error}") from None
            known.add(name)


def write_problem(problem: PlanningProblem, path: Path) -> None:
    """Write a problem file atomically, one linear a line.

    Raises:
        OSError: if it cannot be written.
    """
    lines = ",\n".join("  " + json.dumps(_linear_dict(linear)) for linear in problem.linears)
    target = json.dumps(problem.target)
    head = f'{{"version": {problem.version}, "target": {target}, "linears": [\n'
    write_atomic(path, head + lines + "\n]}\n")


def _linear_dict(linear: LinearChoices) -> dict[str, Any]:
    options: dict[str, dict[str, float | None]] = {}
    for name, cost in linear.options.items():
        options[name] = {"quality_loss": cost.quality_loss, "saving": cost.saving}
        if cost.seconds is not None:
            options[name]["seconds"] = cost.seconds
    return {
        "name": linear.name,
        "stage": linear.stage,
        "flops": linear.flops,
        "options": options,
    }


def _checked_version(value: Any, source: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{source} must hold a JSON object, got {type(value).__name__}")
    version = value.get("version")
    if version != 1 or isinstance(version, bool):
        got = "none" if "version" not in value else repr(version)
        raise UsageError(f"{source}: version {got}; this megatron-snip reads version 1")
    return value


def _with_name(message: str, linears: Any) -> str:
    """Add the name of the linear to a message that starts with `linears.INDEX`."""
    parts = message.split(".", 2)
    if parts[0].endswith("linears") and len(parts) > 1 and isinstance(linears, list):
        digits = parts[1].split(":")[0]
        index = int(digits) if digits.isdecimal() else len(linears)
        linear = linears[index] if index < len(linears) else None
        if isinstance(linear, dict) and isinstance(linear.get("name"), str):
            return f"{message} (linear '{linear['name']}')"
    return message


def _refuse_duplicates(names: tuple[str, ...], source: str) -> None:
    if len(set(names)) == len(names):
        return
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise UsageError(f"{source}: linear '{name}' is listed twice")
        seen.add(name)

"""PrecisionPlan: what was decided, as a file and as a record.

The file, schema version 1, holds exactly these keys:

    {"version": 1, "step": int, "policy": str, "status": str, "objective": number | null,
     "bound": number | null, "seconds": number, "target": number, "efficiency": number,
     "stages": [efficiency of each], "linears": {name: {"fprop", "dgrad", "wgrad"}},
     "digest": str}

`digest` is the SHA-256 (hex) of the JSON of `linears` alone, keys sorted, ASCII, without spaces:
`json.dumps(linears, sort_keys=True, separators=(",", ":"))`. Two plans with equal digests set
every linear alike, whoever made them and whenever, so ranks compare digests before they apply one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from megatron_snip.config import explain
from megatron_snip.errors import UsageError
from megatron_snip.options import Option
from megatron_snip.planning.json_file import read_json, write_atomic
from megatron_snip.types import Gemm

Status = Literal["optimal", "feasible", "fixed", "kept"]
"""optimal: proven best (to the stated scaling error); feasible: all constraints hold, the gap
says how far from best it can be; fixed: the policy does not optimize (uniform, none); kept: the
previous plan stayed because the new one gained less than asked."""

_LISTED = 8


class PrecisionPlan(BaseModel):
    """Which formats every linear's GEMMs take, and how good that choice is.

    Attributes:
        version: of the schema.
        step: training step whose statistics the plan was made from.
        policy: who made it.
        status: what is known about it.
        objective: sum of quality losses; None where a chosen option's loss is unknown.
        bound: proven lower bound of the objective under the same constraints, or None.
        seconds: wall time it took to make.
        target: efficiency it was held to; 0 for policies that heed none.
        efficiency: reached, over all linears (defined in `planning/cost.py`).
        stages: the same for every pipeline stage; 1 for a stage without work.
        linears: option of each linear, by name.
        digest: of the assignment; see the file's description above.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, arbitrary_types_allowed=True
    )

    version: Literal[1] = 1
    step: Annotated[int, Field(ge=0)]
    policy: str
    status: Status
    objective: float | None
    bound: float | None
    seconds: Annotated[float, Field(ge=0.0)]
    target: Annotated[float, Field(ge=0.0, le=1.0)]
    efficiency: float
    stages: tuple[float, ...]
    linears: dict[str, Option]
    digest: str

    @field_validator("linears", mode="before")
    @classmethod
    def _read_options(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: _read_option(name, given) for name, given in value.items()}

    @property
    def iteration(self) -> int:
        """Iteration whose statistics the plan was made from; 0 before training."""
        return self.step

    @property
    def label(self) -> str:
        """The plan in a log line, e.g. `the snip plan of iteration 200`."""
        return f"the {self.policy} plan of iteration {self.iteration}"

    @property
    def gap(self) -> float | None:
        """(objective - bound) / |objective|, at least 0; None where either is unknown."""
        return relative_gap(self.objective, self.bound)

    def option_of(self, name: str) -> Option:
        """Return the option of one linear.

        Raises:
            UsageError: if the plan does not know the linear.
        """
        try:
            return self.linears[name]
        except KeyError:
            raise UsageError(f"the plan of step {self.step} has no linear '{name}'") from None

    def check_against(self, names: Iterable[str], options: Iterable[Option] | None = None) -> None:
        """Refuse a plan that does not fit a model.

        Args:
            names: the model's linears.
            options: what each of them may be set to; None accepts every option.

        Raises:
            UsageError: lists unknown linears, missing linears and unknown options, in one line.
        """
        known = list(names)
        unknown = sorted(set(self.linears) - set(known))
        missing = [name for name in known if name not in self.linears]
        faults = []
        if unknown:
            faults.append(f"linears that the model does not have: {_listing(unknown)}")
        if missing:
            faults.append(f"linears of the model that are missing: {_listing(missing)}")
        if options is not None:
            allowed = set(options)
            foreign = sorted({str(o) for o in self.linears.values() if o not in allowed})
            if foreign:
                offered = ", ".join(str(option) for option in sorted(allowed))
                faults.append(f"options not on offer: {_listing(foreign)} (on offer: {offered})")
        if faults:
            raise UsageError(f"the plan of step {self.step} does not fit: " + "; ".join(faults))

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of the file."""
        return {
            "version": self.version,
            "step": self.step,
            "policy": self.policy,
            "status": self.status,
            "objective": self.objective,
            "bound": self.bound,
            "seconds": self.seconds,
            "target": self.target,
            "efficiency": self.efficiency,
            "stages": list(self.stages),
            "linears": assignment_dict(self.linears),
            "digest": self.digest,
        }

    def to_json(self) -> str:
        """Return the file's text (also what ranks broadcast)."""
        return json.dumps(self.to_dict(), indent=1) + "\n"

    @classmethod
    def from_dict(cls, value: Any, source: str = "plan") -> PrecisionPlan:
        """Build from a parsed JSON object and verify the digest.

        Raises:
            UsageError: one line that names `source` and what is wrong.
        """
        if not isinstance(value, dict):
            raise UsageError(f"{source} must hold a JSON object, got {type(value).__name__}")
        version = value.get("version")
        if version != 1 or isinstance(version, bool):
            got = "none" if "version" not in value else repr(version)
            raise UsageError(f"{source}: version {got}; this megatron-snip reads version 1")
        if isinstance(value.get("stages"), list):
            value = {**value, "stages": tuple(value["stages"])}
        try:
            plan = cls.model_validate(value)
        except ValidationError as error:
            raise UsageError(f"{source}: {explain(error)}") from None
        except UsageError as error:
            raise UsageError(f"{source}: {error}") from None
        wanted = assignment_digest(plan.linears)
        if plan.digest != wanted:
            raise UsageError(
                f"{source}: digest {plan.digest[:12]}... does not match its linears "
                f"({wanted[:12]}...); the file was edited or damaged"
            )
        return plan


def assignment_dict(linears: Mapping[str, Option]) -> dict[str, dict[str, str]]:
    """Return {name: {"fprop", "dgrad", "wgrad"}} as plans store it."""
    return {
        name: {"fprop": option.fprop, "dgrad": option.dgrad, "wgrad": option.wgrad}
        for name, option in linears.items()
    }


def assignment_digest(linears: Mapping[str, Option]) -> str:
    """Return the SHA-256 of an assignment; see the file's description."""
    text = json.dumps(assignment_dict(linears), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def relative_gap(objective: float | None, bound: float | None) -> float | None:
    """Return (objective - bound) / |objective|, clipped at 0; None where either is None.

    Where the objective is 0 the gap is 0 or infinite.
    """
    if objective is None or bound is None:
        return None
    difference = max(0.0, objective - bound)
    if difference == 0.0:
        return 0.0
    return difference / abs(objective) if objective != 0.0 else float("inf")


def changed_linears(old: PrecisionPlan | None, new: PrecisionPlan) -> tuple[str, ...]:
    """Return the linears of `new` whose option differs from `old`'s (all if there is no `old`)."""
    before = {} if old is None else old.linears
    return tuple(name for name, option in new.linears.items() if before.get(name) != option)


def read_plan(path: Path) -> PrecisionPlan:
    """Read a plan file and verify its digest.

    Raises:
        UsageError: if the file is missing, not JSON, breaks the schema or fails its digest.
    """
    return PrecisionPlan.from_dict(read_json(path, "plan file"), f"plan file '{path}'")


def write_plan(plan: PrecisionPlan, path: Path) -> None:
    """Write a plan file atomically.

    Raises:
        OSError: if it cannot be written.
    """
    write_atomic(path, plan.to_json())


def _read_option(name: str, given: Any) -> Option:
    if isinstance(given, Option):
        return given
    wanted = [g.value for g in Gemm]
    if (
        not isinstance(given, dict)
        or sorted(given) != sorted(wanted)
        or not all(isinstance(text, str) for text in given.values())
    ):
        raise UsageError(f"linears: '{name}' must hold formats for {', '.join(wanted)} exactly")
    return Option(**given)


def _listing(words: list[str]) -> str:
    shown = ", ".join(words[:_LISTED])
    return shown if len(words) <= _LISTED else f"{shown} and {len(words) - _LISTED} more"

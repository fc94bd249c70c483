"""PrecisionPlan: the formats of every linear's GEMMs, as a file and as a record.

The file, schema version 3, holds exactly these keys:

    {"version": 3, "iteration": int, "policy": str, "status": str, "objective": number | null,
     "bound": number | null, "seconds": number, "target": number, "efficiency": number,
     "stages": [efficiency of each], "stage_layers": [[{layer: number}]] | null,
     "linears": {name: {"fprop", "dgrad", "wgrad"}}, "digest": str}

`stage_layers` is described in `planning/stage_layers.py`. Version 2 lacks it; it is still read.
`digest` is the SHA-256 (hex) of the JSON of `linears` alone, keys sorted, ASCII, without spaces:
`json.dumps(linears, sort_keys=True, separators=(",", ":"))`. Plans with equal digests set every
linear alike, so ranks compare digests before they apply a plan.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

from megatron_snip.errors import UsageError, listing
from megatron_snip.files import Label, read_json, read_record, write_atomic
from megatron_snip.formats import get_format
from megatron_snip.options import BF16, Option
from megatron_snip.planning.option_table import as_fraction, ratio
from megatron_snip.planning.problem import STRICT
from megatron_snip.planning.stage_layers import StageLayers
from megatron_snip.types import ITERATION_LIMIT

Status = Literal["optimal", "feasible", "fixed"]
"""optimal: proven best (to a relative 1e-9); feasible: all constraints hold, and the gap limits the
distance from the best plan; fixed: no policy optimized it (`uniform-OPTION`)."""

StageAndFlops = Mapping[str, tuple[int, float]]
"""Pipeline stage and FLOPs by linear; of the FLOPs only ratios matter."""


class PrecisionPlan(BaseModel):
    """The option of every linear, and how good that choice is.

    Raises:
        UsageError: if `stage_layers` lacks the layer of a linear.

    Attributes:
        version: Version of the file's schema.
        iteration: Megatron's (1-based) iteration at which the plan was asked for: a measured
            iteration, or one at which only the target changed; 0 for a plan made before training.
        policy: Name of the policy that chose the options.
        status: How good the choice is known to be; see `Status`.
        objective: Sum of quality losses; None if they are not known (no measurement, replaced
            options).
        bound: Proven lower bound of the objective under the same constraints, or None. With a
            change penalty it is a lower bound for plans that change no more linears than this one.
        seconds: Wall time for making the plan.
        target: The least efficiency that was asked for; 0 for policies without a target.
        efficiency: Efficiency over all linears (defined in `planning/option_table.py`).
        stages: Efficiency of every pipeline stage with linears, and of those before it; 1 for a
            stage without linears.
        stage_layers: Which layers each pipeline stage holds; None if that is not known.
        linears: Option of each linear, by name.
        digest: SHA-256 of the assignment; see the file's description.
    """

    model_config = STRICT

    version: Literal[3] = 3
    iteration: Annotated[int, Field(ge=0, lt=ITERATION_LIMIT)]
    policy: Label
    status: Status
    objective: float | None
    bound: float | None
    seconds: Annotated[float, Field(ge=0.0)]
    target: Annotated[float, Field(ge=0.0, le=1.0)]
    efficiency: float
    stages: Annotated[tuple[float, ...], Field(strict=False)]
    stage_layers: StageLayers | None = None
    linears: dict[Label, Option]
    digest: Label

    @model_validator(mode="after")
    def _check_stages(self) -> Self:
        if self.stage_layers is not None:
            self.stage_layers.local_names(self.linears)
        return self

    @property
    def label(self) -> str:
        """The plan in a log line, e.g. `the snip plan of iteration 200`."""
        return f"the {self.policy} plan of iteration {self.iteration}"

    @property
    def gap(self) -> float | None:
        """(objective - bound) / |objective|, at least 0; None where either is unknown.

        Where the objective is 0 the gap is 0 or infinite.
        """
        if self.objective is None or self.bound is None:
            return None
        difference = max(0.0, self.objective - self.bound)
        if difference == 0.0:
            return 0.0
        return difference / abs(self.objective) if self.objective != 0.0 else float("inf")

    def check_against(self, names: Iterable[str]) -> None:
        """Refuse a plan that does not fit a model.

        Args:
            names: the model's linears.

        Raises:
            UsageError: lists unknown and missing linears, in one line.
        """
        model = dict.fromkeys(names)
        unknown = sorted(self.linears.keys() - model.keys())
        missing = [name for name in model if name not in self.linears]
        faults = []
        if unknown:
            faults.append(f"the model does not have {listing(unknown, 8)}")
        if missing:
            faults.append(f"the plan does not have {listing(missing, 8)}")
        if faults:
            raise UsageError(
                f"the plan of iteration {self.iteration} does not fit the model: "
                + "; ".join(faults)
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of the file."""
        return self.model_dump(mode="json")

    def to_json(self) -> str:
        """Return the file's text."""
        return json.dumps(self.to_dict(), indent=1) + "\n"

    @classmethod
    def from_dict(cls, value: Any, source: str = "plan") -> Self:
        """Build from a parsed JSON object and verify the digest.

        Raises:
            UsageError: one line that names `source` and what is wrong.
        """
        plan = read_record(cls, value, source, version=3, older=2)
        wanted = assignment_digest(plan.linears)
        if plan.digest != wanted:
            raise UsageError(
                f"{source}: digest {plan.digest[:12]}... does not match its linears "
                f"({wanted[:12]}...); the file was edited or damaged"
            )
        return plan


def assigned_plan(
    linears: Mapping[str, Option],
    stage_and_flops: StageAndFlops,
    lowest_format: str,
    policy: str,
    iteration: int = 0,
    stage_layers: StageLayers | None = None,
) -> PrecisionPlan:
    """Return the plan of an assignment that no policy made, with its efficiency.

    Args:
        linears: Option of each linear.
        stage_and_flops: Stage and FLOPs of the same linears.
        lowest_format: The format whose share of FLOPs is the efficiency.
        policy: Name of the origin of the assignment, which takes the place of a policy's name.
        iteration: Iteration at which the plan was asked for.
        stage_layers: Which layers each pipeline stage holds; None if that is not known.
    """
    assert set(linears) == set(stage_and_flops)
    num_stages = 1 + max(stage for stage, _ in stage_and_flops.values())
    total = [Fraction(0)] * num_stages
    gain = [Fraction(0)] * num_stages
    for name, (stage, flops) in stage_and_flops.items():
        total[stage] += as_fraction(flops)
        gain[stage] += as_fraction(flops) * as_fraction(linears[name].share_in(lowest_format))
    return PrecisionPlan(
        iteration=iteration,
        policy=policy,
        status="fixed",
        objective=None,
        bound=None,
        seconds=0.0,
        target=0.0,
        efficiency=ratio(sum(gain, Fraction(0)), sum(total, Fraction(0))),
        stages=tuple(map(ratio, gain, total)),
        stage_layers=stage_layers,
        linears=dict(linears),
        digest=assignment_digest(linears),
    )


def without_objective(plan: PrecisionPlan) -> PrecisionPlan:
    """Return the plan of a problem without measurements: its quality loss is not known."""
    # That of BF16 in all linears is known: it is 0.
    if set(plan.linears.values()) == {BF16}:
        return plan
    return plan.model_copy(update={"objective": None, "bound": None})


def format_shares(
    linears: Mapping[str, Option], stage_and_flops: StageAndFlops
) -> dict[str, float]:
    """Return the share of the linears' FLOPs in each format, lowest precision first."""
    flops: dict[str, float] = {}
    for name, (_, linear_flops) in stage_and_flops.items():
        for fmt in linears[name].formats:  # the three GEMMs have 2 M N K FLOPs each
            flops[fmt] = flops.get(fmt, 0.0) + linear_flops / 3
    total = sum(flops.values())
    names = sorted(flops, key=lambda fmt: get_format(fmt).bits)
    return {fmt: flops[fmt] / total for fmt in names}


def shares_text(shares: Mapping[str, float]) -> str:
    """Return what `format_shares` found, for a log line: `62.5% fp4, 37.5% fp8`."""
    return ", ".join(f"{share:.1%} {name}" for name, share in shares.items())


def assignment_digest(linears: Mapping[str, Option]) -> str:
    """Return the SHA-256 of an assignment; see the file's description."""
    formats = {name: vars(option) for name, option in linears.items()}
    text = json.dumps(formats, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def changed_linears(old: PrecisionPlan, new: PrecisionPlan) -> tuple[str, ...]:
    """Return the linears of `new` whose option differs from `old`'s."""
    return tuple(name for name, option in new.linears.items() if old.linears.get(name) != option)


def read_plan(path: Path) -> PrecisionPlan:
    """Read a plan file and verify its digest.

    Raises:
        UsageError: if the file is missing, not JSON, breaks the schema or fails its digest.
    """
    value = read_json(path, "plan file")
    if isinstance(value, dict) and isinstance(value.get("linears"), list):
        raise UsageError(f"'{path}' is a problem, and a plan is wanted: plans/<iteration>.json")
    return PrecisionPlan.from_dict(value, f"plan file '{path}'")


def write_plan(plan: PrecisionPlan, path: Path) -> None:
    """Write a plan file atomically.

    Raises:
        OSError: if it cannot be written.
    """
    write_atomic(path, plan.to_json())

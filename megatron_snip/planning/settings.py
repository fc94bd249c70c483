"""PlanSettings: how a plan is to be made. The problem says what; this says under which rules."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron_snip.config import SnipConfig, explain
from megatron_snip.errors import UsageError

CostName = Literal["flops", "time"]
Balance = Literal["none", "stage", "bottleneck"]

_Count = Annotated[int, Field(ge=0)]


class PlanSettings(BaseModel):
    """Rules for one plan; see the field docstrings. Values in JSON and Python are the same.

    Raises:
        pydantic.ValidationError: on an unknown key or a value out of range; `from_dict`
            turns it into a one-line `UsageError`.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    policy: str = "snip"
    """Who makes the plan; a name from `policies.policy_names()`."""

    target: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    """Least efficiency; None takes the problem's own target. The policies `uniform-OPTION` and
    `none` heed neither target nor balance."""

    pipeline_balance: Balance = "none"
    """`none`: the target holds overall. `stage`: it holds in every pipeline stage.
    `bottleneck`: the slowest stage is made as fast as the other rules allow, then the quality
    loss is minimized without making it slower; the target holds overall. So the slowest stage
    goes to its fastest options unless pins or max_changes hold it back, and the target is no more
    than a floor; stages with less work keep gentler options for as long as they have time."""

    pins: tuple[tuple[str, str], ...] = ()
    """(glob, option) pairs: every linear whose name matches keeps that option. Two pins that
    disagree on a linear conflict."""

    first_layers: tuple[_Count, str] | None = None
    """(N, option): the linears of the first N layers of every block keep that option."""

    last_layers: tuple[_Count, str] | None = None
    """(N, option): the linears of the last N layers of every block keep that option."""

    max_changes: _Count | None = None
    """Most linears whose option may differ from the previous plan's. Linears whose previous
    option is no longer on offer must change and do not count."""

    min_gain: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """The new plan's quality loss must be lower than the previous plan's by this share of it,
    or the previous plan stays, where it keeps to all the rules."""

    cost: CostName = "flops"
    """What efficiency counts: `flops` (share of FLOPs in the lowest precision) or `time`."""

    time_limit_s: Annotated[float, Field(gt=0.0)] = 30.0
    """Wall-clock seconds that planning may take; then the best plan so far counts."""

    workers: Annotated[int, Field(ge=1)] = 1
    """Threads of the solver. With 1 the same input gives the same plan on any run, unless the
    time limit strikes."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of the solver and of the random policy."""

    gap: Annotated[float, Field(ge=0.0)] = 1e-3
    """Proven relative gap that is good enough. The solver looks for the optimum for a fixed
    amount of work and goes on past it only while the gap is larger than this."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that JSON can carry and `from_dict` reads back."""
        return self.model_dump(mode="json")

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> PlanSettings:
        """Build from plain values.

        Raises:
            UsageError: one line naming the field, what was got and what is wanted.
        """
        try:
            return cls(**value)
        except ValidationError as error:
            raise UsageError(f"plan settings: {explain(error)}") from None

    @classmethod
    def from_config(cls, config: SnipConfig, seed: int = 0) -> PlanSettings:
        """Take the planner's share of a run's settings."""
        return cls.from_dict(
            {
                "policy": config.policy,
                "target": config.efficiency_target,
                "pipeline_balance": config.pipeline_balance,
                "pins": tuple((glob, str(option)) for glob, option in config.pin_pairs),
                "max_changes": config.max_changes,
                "min_gain": config.min_gain,
                "seed": seed,
            }
        )

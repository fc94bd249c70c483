"""PlanSettings: the rules under which a plan is made."""

from typing import Annotated, Any, Self

from pydantic import Field

from megatron_snip.config import EfficiencyMeasure, PipelineBalance, Section, Share, SnipConfig


class PlanSettings(Section):
    """Rules for one plan; values in JSON and Python are the same.

    Raises:
        pydantic.ValidationError: on an unknown key or a value out of range.
    """

    policy: str = "snip"
    """Name of the policy; see `policies.policy_names()`."""

    target: Share | None = None
    """Least efficiency; None takes the problem's target, as a run does after its first plan. The
    policies `uniform-OPTION` ignore target and balance."""

    pipeline_balance: PipelineBalance = "none"
    """`none`: the target holds for the model. `stage`: the target holds in every pipeline stage."""

    pins: tuple[tuple[str, str], ...] = ()
    """(glob, option) pairs: every linear whose name matches has that option. Two pins with
    different options for a linear conflict."""

    change_penalty: Annotated[float, Field(ge=0.0, le=1e150)] = 0.0
    """Quality loss that a plan pays for each linear whose option differs from the previous
    plan's. Free for linears whose previous option is no longer available."""

    cost: EfficiencyMeasure = "flops"
    """What efficiency counts: `flops` (share of FLOPs in the lowest precision) or `time`."""

    time_limit_s: Annotated[float, Field(gt=0.0)] = 30.0
    """Wall-clock limit in seconds; the best plan found by then is returned."""

    workers: Annotated[int, Field(ge=1, le=1024)] = 1
    """Threads of the solver. With 1 the same input gives the same plan in every run, unless the
    time limit is reached."""

    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0
    """Seed of the solver and of the policy `random`."""

    gap: Annotated[float, Field(ge=0.0)] = 1e-3
    """Relative gap that is good enough. The solver searches for the optimum for a fixed amount of
    work, and continues only while the gap is larger than this."""

    @classmethod
    def of(cls, config: SnipConfig, **others: Any) -> Self:
        """Return the rules for plans of a run, by the run's settings and what these do not have."""
        return cls(
            policy=config.policy,
            pipeline_balance=config.pipeline_balance,
            change_penalty=config.change_penalty,
            cost=config.cost,
            **others,
        )

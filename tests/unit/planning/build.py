"""Short ways to write problems, tasks and plans in tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_snip.options import Option
from megatron_snip.planning.constraints import Constraints, make_constraints
from megatron_snip.planning.option_table import make_table
from megatron_snip.planning.plan import PrecisionPlan, assignment_digest
from megatron_snip.planning.problem import LinearChoices, OptionCost, PlanningProblem
from megatron_snip.planning.settings import PlanSettings

MODULES = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
"""Linears of a layer."""
SAVING = {"bf16": 0.0, "fp8": 0.0, "fp4": 1.0, "fp4-fp8-fp8": 1 / 3}


def name_of(layer: int, module: str = "mlp.linear_fc1") -> str:
    return f"decoder.layers.{layer}.{module}"


def problem_of(
    losses: Sequence[Sequence[float | None]],
    target: float = 0.5,
    options: Sequence[str] = ("fp8", "fp4"),
    stages: Sequence[int] | None = None,
    flops: Sequence[float] | None = None,
    seconds: Sequence[Sequence[float]] | None = None,
    scores: Sequence[Mapping[str, float | None]] | None = None,
) -> PlanningProblem:
    """One linear a layer; losses[i][j] is the loss of option j at layer i, scores[i] are fp4's."""
    linears = []
    for i, row in enumerate(losses):
        costs = {
            option: OptionCost(
                quality_loss=row[j],
                saving=SAVING[option],
                seconds=None if seconds is None else seconds[i][j],
                scores=dict(scores[i]) if scores is not None and option == "fp4" else {},
            )
            for j, option in enumerate(options)
        }
        stage = 0 if stages is None else stages[i]
        work = 1.0 if flops is None else flops[i]
        linears.append(LinearChoices(name=name_of(i), stage=stage, flops=work, options=costs))
    return PlanningProblem(linears=tuple(linears), target=target)


def plan_of(options: Mapping[str, str] | Sequence[str], **changes: object) -> PrecisionPlan:
    """A plan with given options, by name or by layer; its other fields are placeholders."""
    if not isinstance(options, Mapping):
        options = {name_of(i): option for i, option in enumerate(options)}
    linears = {name: Option.parse(option) for name, option in options.items()}
    values: dict[str, object] = {
        "iteration": 0,
        "policy": "snip",
        "status": "feasible",
        "objective": None,
        "bound": None,
        "seconds": 0.0,
        "target": 0.0,
        "efficiency": 0.0,
        "stages": (0.0,),
        "linears": linears,
        "digest": assignment_digest(linears),
    }
    return PrecisionPlan(**(values | changes))


def constraints_of(problem: PlanningProblem, **settings: object) -> Constraints:
    """The constraints on a plan for a problem."""
    chosen = PlanSettings(**settings)
    target = problem.target if chosen.target is None else chosen.target
    return make_constraints(make_table(problem, chosen.cost), chosen, target, None)


def options_of(plan: PrecisionPlan) -> list[str]:
    """The options of a plan, in order."""
    return [str(option) for option in plan.linears.values()]

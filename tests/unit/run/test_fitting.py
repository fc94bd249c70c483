"""Plans of another run, changed to what the linears and the settings of this one allow."""

from typing import Any

from megatron_snip.options import BF16, Option
from megatron_snip.planning.fixed import Source
from megatron_snip.planning.problem import PlanningProblem
from megatron_snip.planning.stage_layers import StageLayers
from tests.unit.planning.build import options_of, plan_of, problem_of
from tests.unit.run.build import FP4, FP8, STAGE_LAYERS, A, B, C, run_plans, state_of


def test_plans_of_other_machines_lose_no_precision() -> None:
    plan = plan_of(["fp4", "fp4", "fp4"], policy="snip", iteration=7)
    refusals = {FP4: {A: "no", C: "no"}, FP8: {C: "not either"}}
    settings = {"formats": "bf16,fp8,fp4", "efficiency_target": 0.25}
    found = run_plans(refusals, **settings).first_plan(state_of(plan, **settings), 0, 6)
    adapted = found.plan
    assert options_of(adapted) == ["fp8", "fp4", "bf16"]
    assert (adapted.policy, adapted.iteration, adapted.status) == ("snip", 6, "fixed")
    assert (adapted.efficiency, adapted.stages) == (0.25, (0.0, 1 / 3))
    assert found.changes == (
        "1 of 3 linears run fp8 instead of fp4: no",
        "1 of 3 linears run bf16 instead of fp4: no",
    )
    kept, replaced = run_plans({FP8: {C: "no"}}).fitted(plan)
    assert (options_of(kept), replaced) == (["fp4", "fp4", "fp4"], [])


def test_a_plan_of_another_layout_gets_the_stages_and_efficiencies_of_this_one() -> None:
    """Export reads the stages, and healing the efficiency."""
    layers = StageLayers([[{f"decoder.layers.{i}": i for i in range(3)}]])
    old: dict[str, Any] = {"efficiency": 1.0, "stages": (1.0,), "stage_layers": layers}
    plan = plan_of(["fp8", "fp4", "fp4"], objective=0.25, **old)
    plans = run_plans()
    kept, _ = plans.fitted(plan)
    wanted = {"efficiency": 0.75, "stages": (0.0, 1.0), "stage_layers": STAGE_LAYERS}
    assert kept == plan.model_copy(update=wanted)
    # Where the efficiencies are those of seconds, the layers are still this run's.
    timed = run_plans(cost="time", collect_only=True)
    two = plan.model_copy(update={"stages": (0.2, 0.3)})
    assert timed.fitted(two)[0] == two.model_copy(update={"stage_layers": STAGE_LAYERS})
    # What the run makes without a search, and a problem of another layout.
    assert plans.job_fallback(plan, 5).stage_layers == STAGE_LAYERS
    problem = problem_of([[0.0, 1.0]] * 3).model_copy(update={"stage_layers": layers})
    fitted = plans.fitted_problem(problem)
    assert fitted.stage_layers == STAGE_LAYERS
    assert PlanningProblem.from_dict(fitted.to_dict()) == fitted


def test_tied_linears_get_one_option() -> None:
    plans = run_plans({FP4: {B: "too small"}}, ties=((B, C),))
    plan, replaced = plans.fitted(plan_of(["fp4"] * 3))
    assert options_of(plan) == ["fp4", "fp8", "fp8"]
    assert {each.reason for each in replaced} == {
        "too small",
        "its operations are fused with those of another linear",
    }
    assert plans.available.problem_without_measurements(0.2).ties == ((B, C),)


def test_options_of_fixed_linears_are_asked_for_in_the_order_of_the_model() -> None:
    """All ranks must ask in the same order, and a set of options has another in each process."""
    options = [Option.parse(text) for text in ("fp4-fp8-fp8", "fp8-fp4-fp8", "fp8-fp8-fp4")]
    job = dict(zip((A, B, C), options, strict=True))
    refusals = Refusals({BF16: {}})
    plans = run_plans(refusals, job=job, rules=dict.fromkeys(job, Source.FILE), efficiency_target=0)
    plans.fitted(plan_of(["fp4", "fp4", "fp4"]))
    assert [option for option in dict.fromkeys(refusals.asked) if option in options] == options


class Refusals(dict[Option, dict[str, str]]):
    """What linears refuse, and the options that they were asked for."""

    def __init__(self, refused: dict[Option, dict[str, str]]) -> None:
        super().__init__(refused)
        self.asked: list[Option] = []

    def get(self, option: Option, default: Any = None) -> Any:
        self.asked.append(option)
        return super().get(option, default)


def test_a_resumed_problem_keeps_what_the_job_runs_where_no_backward_came() -> None:
    """The linear in the middle was never called, and runs FP8 though the formats lack it."""
    losses = [[0.0, 0.1, 0.4], [None, 0.0, None], [0.0, 0.1, 0.4]]
    problem = problem_of(losses, options=("bf16", "fp8", "fp4"))
    plans = run_plans(job=dict.fromkeys((A, B, C), FP8), formats="bf16,fp4")
    rows = plans.fitted_problem(problem).linears
    assert [list(row.options) for row in rows] == [
        ["bf16", "fp4"],
        ["bf16", "fp4", "fp8"],
        ["bf16", "fp4"],
    ]

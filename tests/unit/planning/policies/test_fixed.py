import pytest

from megatron_snip.errors import InfeasiblePlanError, UsageError
from megatron_snip.planning.planner import make_plan
from megatron_snip.planning.settings import PlanSettings
from tests.unit.planning.build import name_of, options_of, plan_of, problem_of

PROBLEM = problem_of([[0.5, 1.0], [0.25, None]], target=0.75)


@pytest.mark.parametrize(
    ("policy", "objective", "efficiency"),
    [("uniform-fp8", 0.75, 0.0), ("uniform-bf16", 0.0, 0.0), ("uniform-fp4", 3.0, 1.0)],
)
def test_uniform_policies_heed_no_target(policy: str, objective: float, efficiency: float) -> None:
    plan = make_plan(problem_of([[0.5, 1.0], [0.25, 2.0]], 0.75), PlanSettings(policy=policy))
    assert set(options_of(plan)) == {policy.removeprefix("uniform-")}
    assert (plan.status, plan.target) == ("fixed", 0.0)
    assert (plan.objective, plan.bound, plan.efficiency) == (objective, objective, efficiency)


def test_uniform_policies_keep_pins() -> None:
    plan = make_plan(PROBLEM, PlanSettings(policy="uniform-fp8", pins=(("*.layers.0.*", "bf16"),)))
    assert options_of(plan) == ["bf16", "fp8"]
    pins = (("*.layers.0.*", "fp8"), ("*.layers.0.*", "fp4"))
    with pytest.raises(InfeasiblePlanError) as caught:
        make_plan(PROBLEM, PlanSettings(policy="uniform-fp8", pins=pins))
    assert caught.value.conflicts == ("pin *.layers.0.*=fp8", "pin *.layers.0.*=fp4")


def test_uniform_policies_cannot_have_what_is_forbidden() -> None:
    with pytest.raises(InfeasiblePlanError) as caught:
        make_plan(PROBLEM, PlanSettings(policy="uniform-fp4"))
    assert caught.value.conflicts == ("policy uniform-fp4", "forbidden options")
    assert f"no option is left for {name_of(1)}" in str(caught.value)
    pinned = PlanSettings(policy="uniform-fp4", pins=((name_of(1), "fp8"),))
    assert options_of(make_plan(PROBLEM, pinned)) == ["fp4", "fp8"]


def test_uniform_policies_keep_to_the_limit_on_changes() -> None:
    before = plan_of(["fp8", "bf16"])  # bf16 is not listed: leaving it does not count
    settings = PlanSettings(policy="uniform-fp8", max_changes=0)
    assert options_of(make_plan(PROBLEM, settings, before)) == ["fp8", "fp8"]
    settings = settings.model_copy(update={"pins": ((name_of(0), "fp4"),)})
    with pytest.raises(InfeasiblePlanError) as caught:
        make_plan(PROBLEM, settings, before)
    assert caught.value.conflicts == ("max-changes 0", f"pin {name_of(0)}=fp4")
    with pytest.raises(InfeasiblePlanError) as caught:
        make_plan(PROBLEM, settings.model_copy(update={"pins": ()}), plan_of(["fp4", "fp8"]))
    assert caught.value.conflicts == ("max-changes 0", "policy uniform-fp8")


def test_uniform_policies_need_their_option_on_offer() -> None:
    with pytest.raises(UsageError, match="fp3"):
        make_plan(PROBLEM, PlanSettings(policy="uniform-fp3"))


def test_none_changes_nothing() -> None:
    before = plan_of(["fp4", "bf16"])
    plan = make_plan(PROBLEM, PlanSettings(policy="none"), before)
    assert plan.digest == before.digest
    assert plan.status == "fixed"
    assert options_of(make_plan(PROBLEM, PlanSettings(policy="none"))) == ["bf16", "bf16"]


def test_none_cannot_keep_what_is_forbidden_now() -> None:
    with pytest.raises(InfeasiblePlanError) as caught:
        make_plan(PROBLEM, PlanSettings(policy="none"), plan_of(["fp4", "fp4"]))
    assert caught.value.conflicts == ("policy none", "forbidden options")


def test_none_cannot_keep_what_the_problem_does_not_know() -> None:
    with pytest.raises(UsageError, match="previous plan's option"):
        make_plan(PROBLEM, PlanSettings(policy="none"), plan_of(["fp3", "fp8"]))

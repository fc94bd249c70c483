"""The planner as a whole, against enumeration and HiGHS, and its promises one by one."""

import itertools
import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_snip.errors import InfeasiblePlanError, PlanningError, UsageError
from megatron_snip.planning import planner
from megatron_snip.planning.plan import changed_linears
from megatron_snip.planning.planner import make_plan, make_plan_report
from megatron_snip.planning.problem import LinearChoices, OptionCost, PlanningProblem
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.planning.validate import find_violations
from tests.unit.planning.build import name_of, options_of, plan_of, problem_of
from tests.unit.planning.instances import OPTIONS, Instance, random_instance
from tests.unit.planning.oracle import brute_force, highs_model

LOSS = st.one_of(
    st.none(),
    st.just(0.0),
    st.integers(0, 3).map(float),
    st.floats(-1.0, 1.0),
    st.floats(1e-6, 1e6),
    st.integers(-6, 6).map(lambda power: 10.0**power),
)
FLOPS = st.one_of(st.integers(0, 5).map(float), st.floats(0.5, 100.0))
SAVING = st.sampled_from([0.0, 0.1, 1 / 3, 0.5, 2 / 3, 1.0])


@st.composite
def small_instances(draw: st.DrawFn) -> Instance:
    """Any problem that is small enough to enumerate, under any rules."""
    count = draw(st.integers(1, 6))
    names = draw(st.lists(st.sampled_from(OPTIONS), min_size=1, max_size=4, unique=True))
    timed = draw(st.booleans())
    linears = tuple(
        LinearChoices(
            name=name_of(i),
            stage=draw(st.integers(0, 2)),
            flops=draw(FLOPS),
            options={
                name: OptionCost(
                    quality_loss=draw(LOSS),
                    saving=draw(SAVING),
                    seconds=draw(st.integers(0, 9).map(float)) if timed else None,
                )
                for name in names
            },
        )
        for i in range(count)
    )
    # Targets of the size of the tolerance are met by nothing or not, as they round.
    target = draw(st.sampled_from([0.0, 0.25, 1 / 3, 0.5, 0.75, 1.0]) | st.floats(1e-6, 1.0))
    problem = PlanningProblem(linears=linears, target=target)
    previous = None
    if draw(st.booleans()):
        previous = plan_of([draw(st.sampled_from([*names, "fp8"])) for _ in range(count)])
    pinned = draw(
        st.lists(st.tuples(st.integers(0, count - 1), st.sampled_from(names)), max_size=2)
    )
    rules = PlanSettings(
        pipeline_balance=draw(st.sampled_from(["none", "stage", "bottleneck"])),
        pins=tuple((name_of(i), option) for i, option in pinned),
        max_changes=draw(st.integers(0, count)) if previous is not None else None,
        cost=draw(st.sampled_from(["flops", "time"])) if timed else "flops",
    )
    return Instance(problem, rules, previous)


def check_against(wanted: float | None, instance: Instance, rel: float = 1e-9) -> None:
    """Plan, and compare with the optimum (None: infeasible)."""
    problem, rules, previous = instance.problem, instance.settings, instance.previous
    if wanted is None:
        with pytest.raises(InfeasiblePlanError):
            make_plan(problem, rules, previous)
        return
    report = make_plan_report(problem, rules, previous)
    plan = report.plan
    size = sum(
        max(abs(c.quality_loss) for c in linear.options.values() if c.quality_loss is not None)
        for linear in problem.linears
    )
    allowed = rel * size + 2 * report.scaling_error
    assert plan.status == "optimal"
    assert plan.objective == pytest.approx(wanted, abs=allowed)
    assert plan.bound <= wanted + allowed
    assert find_violations(plan, problem, rules, previous) == []


@settings(max_examples=300, deadline=None)
@given(small_instances())
def test_small_problems_are_solved_as_enumeration_solves_them(instance: Instance) -> None:
    wanted = brute_force(instance.problem, instance.settings, instance.previous)
    check_against(wanted, instance)


@pytest.mark.parametrize("chunk", range(4))
def test_adversarial_problems_are_solved_as_enumeration_solves_them(chunk: int) -> None:
    for seed in range(chunk * 100, (chunk + 1) * 100):
        instance = random_instance(seed)
        wanted = brute_force(instance.problem, instance.settings, instance.previous)
        check_against(wanted, instance)


@pytest.mark.parametrize("num_linears", [30, 90])
def test_medium_problems_are_solved_at_least_as_well_as_by_highs(num_linears: int) -> None:
    compared = 0
    for seed in range(20):
        instance = random_instance(seed, num_linears=num_linears)
        model = highs_model(instance.problem, instance.settings, instance.previous)
        wanted = None if model is None else model.solve()
        if wanted is None:
            check_against(None, instance)
            continue
        plan = make_plan(instance.problem, instance.settings, instance.previous)
        # HiGHS stops at an absolute gap of 1e-6 of the largest loss, and may miss by as much.
        tolerance = 2e-6 * model.scale
        assert wanted - 2e-2 * abs(wanted) - tolerance <= plan.objective <= wanted + tolerance
        assert plan.bound <= wanted + tolerance
        compared += 1
    assert compared >= 8


def test_the_gap_of_ordinary_medium_problems_agrees_with_highs_closely() -> None:
    random = np.random.default_rng(0)
    losses = [[0.0, float(a), float(a + b)] for a, b in random.random((60, 2))]
    problem = problem_of(losses, 0.6, ("fp8", "fp4-fp8-fp8", "fp4"), flops=[1.0, 2.0, 3.5] * 20)
    wanted = highs_model(problem, PlanSettings()).solve()
    assert make_plan(problem, PlanSettings()).objective == pytest.approx(wanted, rel=1e-7)


def test_the_same_input_gives_the_same_plan_in_any_process() -> None:
    instance = random_instance(11, num_linears=90)
    program = (
        "from tests.unit.planning.instances import random_instance\n"
        "from megatron_snip.planning.planner import make_plan\n"
        "i = random_instance(11, num_linears=90)\n"
        "p = make_plan(i.problem, i.settings, i.previous)\n"
        "print(p.digest, p.objective.hex(), p.bound.hex())\n"
    )
    here = make_plan(instance.problem, instance.settings, instance.previous)
    there = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    assert there.stdout.split() == [here.digest, here.objective.hex(), here.bound.hex()]


def test_the_plan_carries_everything_it_should() -> None:
    problem = problem_of([[0.0, 1.0], [0.0, 3.0]], target=0.5, stages=[0, 1])
    plan = make_plan(problem, PlanSettings(), step=40)
    assert (plan.step, plan.policy, plan.status, plan.target) == (40, "snip", "optimal", 0.5)
    assert (plan.objective, plan.efficiency, plan.stages) == (1.0, 0.5, (1.0, 0.0))
    assert plan.bound == pytest.approx(1.0)
    assert plan.seconds > 0.0
    assert options_of(plan) == ["fp4", "fp8"]


def test_settings_override_the_problem_s_target() -> None:
    problem = problem_of([[0.0, 1.0]] * 4, target=0.5)
    assert make_plan(problem, PlanSettings(target=0.75)).efficiency == 0.75


def test_unknown_formats_are_named() -> None:
    options = {"int2": OptionCost(quality_loss=0.0, saving=1.0)}
    linear = LinearChoices(name="a", stage=0, flops=1.0, options=options)
    with pytest.raises(UsageError, match="int2"):
        make_plan(PlanningProblem(linears=(linear,), target=0.5), PlanSettings())


def test_a_previous_plan_of_another_model_is_refused() -> None:
    with pytest.raises(UsageError, match="does not fit"):
        make_plan(problem_of([[0.0, 1.0]]), PlanSettings(), plan_of(["fp8", "fp8"]))


def test_no_more_linears_change_than_allowed() -> None:
    random = np.random.default_rng(1)
    problem = problem_of([[0.0, float(x)] for x in random.random(20)], target=0.5)
    previous = plan_of(["fp4"] * 10 + ["fp8"] * 10)
    free = len(changed_linears(previous, make_plan(problem, PlanSettings(), previous)))
    for limit in range(free + 2):
        plan = make_plan(problem, PlanSettings(max_changes=limit), previous)
        assert len(changed_linears(previous, plan)) <= min(limit, free)


def test_leaving_options_that_are_gone_is_no_counted_change() -> None:
    problem = problem_of([[0.0, 1.0]] * 4, target=0.5)
    plan = make_plan(problem, PlanSettings(max_changes=0), plan_of(["bf16"] * 4))
    assert sorted(options_of(plan)) == ["fp4", "fp4", "fp8", "fp8"]


@pytest.mark.parametrize(
    ("min_gain", "status", "options"),
    [
        (0.0, "optimal", ["fp4", "fp8"]),
        (0.2, "optimal", ["fp4", "fp8"]),
        (0.3, "kept", ["fp8", "fp4"]),
    ],
)
def test_a_change_must_gain_enough(min_gain: float, status: str, options: list[str]) -> None:
    problem = problem_of([[0.0, 3.0], [0.0, 4.0]], target=0.5)  # changing gains a quarter
    plan = make_plan(problem, PlanSettings(min_gain=min_gain), plan_of(["fp8", "fp4"]))
    assert (plan.status, options_of(plan)) == (status, options)
    assert plan.objective == (3.0 if status == "optimal" else 4.0)
    assert plan.bound == pytest.approx(3.0)


def test_ties_do_not_change_the_plan() -> None:
    problem = problem_of([[0.0, 1.0]] * 4, target=0.5)
    for chosen in itertools.combinations(range(4), 2):
        previous = plan_of(["fp4" if i in chosen else "fp8" for i in range(4)])
        assert make_plan(problem, PlanSettings(), previous).digest == previous.digest


def test_a_previous_plan_that_breaks_a_rule_does_not_stay() -> None:
    problem = problem_of([[0.0, 1.0]] * 2, target=1.0)
    plan = make_plan(problem, PlanSettings(min_gain=1.0), plan_of(["fp8", "fp8"]))
    assert options_of(plan) == ["fp4", "fp4"]


def test_the_bottleneck_is_the_slowest_stage_s_time() -> None:
    # Stage 0 has three linears, stage 1 one: the former decides, the latter may stay gentle.
    problem = problem_of([[0.0, 1.0]] * 4, target=0.5, stages=[0, 0, 0, 1])
    plan = make_plan(problem, PlanSettings(pipeline_balance="bottleneck"))
    assert options_of(plan) == ["fp4", "fp4", "fp4", "fp8"]
    assert plan.stages == (1.0, 0.0)


def test_all_null_problems_are_infeasible_and_zero_losses_are_not() -> None:
    with pytest.raises(InfeasiblePlanError):
        make_plan(problem_of([[None, None]] * 3, target=0.0), PlanSettings())
    assert make_plan(problem_of([[0.0, 0.0]] * 3, target=1.0), PlanSettings()).objective == 0.0


def test_models_without_work_reach_every_target() -> None:
    problem = problem_of([[0.5, 1.0]] * 2, target=1.0, flops=[0.0, 0.0], stages=[0, 3])
    plan = make_plan(problem, PlanSettings(pipeline_balance="stage"))
    assert (plan.objective, plan.efficiency, plan.stages) == (1.0, 1.0, (1.0, 1.0, 1.0, 1.0))


def test_the_time_limit_is_honoured_and_still_gives_a_plan() -> None:
    random = np.random.default_rng(2)
    losses = [[0.0, *(random.lognormal(0, 2, 2))] for _ in range(400)]
    problem = problem_of(
        losses, 0.6, ("fp8", "fp4-fp8-fp8", "fp4"), stages=[i % 8 for i in range(400)]
    )
    limits = PlanSettings(pipeline_balance="stage", time_limit_s=1e-3)
    plan = make_plan(problem, limits)
    assert min(plan.stages) >= 0.6
    assert plan.bound <= plan.objective


def test_an_invalid_plan_is_never_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "find_violations", lambda *_: ["something is wrong"])
    with pytest.raises(PlanningError, match="something is wrong"):
        make_plan(problem_of([[0.0, 1.0]]), PlanSettings())


def test_the_planner_needs_neither_torch_nor_megatron() -> None:
    program = (
        "import sys, megatron_snip.planning.worker\n"
        "import megatron_snip.cli.plan, megatron_snip.cli.pareto\n"
        "print([m for m in ('torch', 'megatron', 'matplotlib', 'scipy') if m in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    assert json.loads(done.stdout.replace("'", '"')) == []

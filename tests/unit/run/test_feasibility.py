"""Settings that no plan satisfies, and the default target that one can reach."""

from typing import Any

import pytest

from megatron_snip.config import make_config
from megatron_snip.errors import UsageError
from megatron_snip.options import BF16, Option
from tests.unit.planning.build import options_of, plan_of
from tests.unit.run.build import FP4, FP8, FP8_JOB, A, B, C, first, run_plans, state_of


@pytest.mark.parametrize(
    ("formats", "target"),
    [
        ("fp8,fp8-forward-fp4-backward", 0.5),
        ("fp8,fp4-forward-mxfp8-backward", 0.25),
        ("bf16,fp8-bf16-bf16", 0.25),
        ("fp8,fp4", 0.75),
    ],
)
def test_the_default_target_is_a_share_of_what_the_options_can_lower(
    formats: str, target: float
) -> None:
    plans = run_plans(formats=formats)
    assert plans.config.efficiency_target == target
    assert plans.first_plan(None, 0).plan is not None
    text = f"the efficiency target is {target:g}, 0.75 of the "
    assert sum(text in line for line in plans.available.warnings) == (target < 0.75)
    if target < 0.75:  # a target of the user's is not changed
        with pytest.raises(UsageError, match="best reachable target"):
            run_plans(formats=formats, efficiency_target=0.75).first_plan(None, 0)


def test_constraints_that_cannot_be_met_fail_at_the_start() -> None:
    with pytest.raises(UsageError, match=r"pin \*=fp8"):
        first(pins=("*=fp8",), efficiency_target=0.75)
    first(pins=("*=fp8",), collect_only=True)  # no plan will be made
    with pytest.raises(UsageError, match="unknown policy"):
        first(state_of(plan_of(["fp8"] * 3)), policy="best")
    with pytest.raises(UsageError, match="does not fit"):
        first(state_of(plan_of(["fp8"] * 4)))


def test_pins_that_contradict_each_other_are_named_as_pins() -> None:
    with pytest.raises(UsageError, match=r"^pins: no plan satisfies: pin") as caught:
        first(pins=f"{A}=fp8,*=fp4", efficiency_target=0.0)
    assert caught.value.field == "pins"


def test_linears_that_run_the_job_s_option_only_keep_it_and_lower_the_target() -> None:
    refusals = {o: {B: "it is fixed"} for o in (BF16, FP4)}
    plans = run_plans(refusals, FP8_JOB)
    assert plans.config.efficiency_target == 0.75
    problem = plans.problem_without_measurements(0.75)
    assert [sorted(row.options) for row in problem.linears] == [
        ["fp4", "fp8"],
        ["fp8"],
        ["fp4", "fp8"],
    ]
    assert "fp4 is not available to 1 linears: it is fixed" in plans.available.warnings
    assert options_of(plans.fitting.plan(plan_of(["fp4"] * 3))[0]) == ["fp4", "fp8", "fp4"]
    refusals |= {FP4: {B: "it is fixed", C: "it is stored"}}
    plans = run_plans(refusals, FP8_JOB)
    assert plans.config.efficiency_target == 0.25
    assert "the efficiency target is 0.25, the highest that" in plans.available.warnings[-1]
    assert plans.first_plan(None, 0).plan.target <= 0.25
    with pytest.raises(UsageError, match=r"best reachable target is 0\.25"):
        run_plans(refusals, FP8_JOB, efficiency_target=0.75).first_plan(None, 0)


def test_a_glob_pins_the_linears_that_can_run_its_option() -> None:
    refusals = {FP8: {B: "its shape is odd"}}
    plans = run_plans(refusals, formats="bf16,fp8,fp4", pins="*=fp8", efficiency_target=0.0)
    assert options_of(plans.first_plan(None, 0).plan) == ["fp8", "bf16", "fp8"]
    assert plans.config.pins == (f"{A}=fp8", f"{B}=bf16", f"{C}=fp8")
    assert f"pin *=fp8: 1 of 3 linears run bf16 instead: {B}: its shape is odd" in (
        plans.available.warnings
    )
    for pins in (f"{B}=fp8", "*.layers.1.*=fp8"):  # no linear of theirs can run it
        with pytest.raises(UsageError, match=rf"'fp8' is not an option of '{B}' \(bf16, fp4\)"):
            first(refusals=refusals, formats="bf16,fp8,fp4", pins=pins)


@pytest.mark.parametrize("pinned", ["mxfp8", "fp4"])
def test_pins_that_replace_a_glob_are_settings_that_can_be_read(pinned: str) -> None:
    """A report reads them in config.yaml. One linear runs the job's own option only."""
    refusals = {Option.parse(o): {B: "it is fixed"} for o in ("bf16", "mxfp8", "fp4")}
    plans = run_plans(
        refusals, FP8_JOB, formats="mxfp8,fp4", pins=f"*={pinned}", efficiency_target=0.0
    )
    assert plans.config.pins == (f"{A}={pinned}", f"{C}={pinned}")
    assert make_config(plans.config.model_dump(mode="json")) == plans.config
    assert plans.first_plan(None, 0).plan.linears[B] == FP8


@pytest.mark.parametrize("formats", ["fp8,fp4", "bf16,fp8,fp4"])
def test_a_pin_to_bf16_of_linears_that_cannot_run_it_is_refused(formats: str) -> None:
    """Every plan of a run has its pins, and nothing else refuses BF16."""
    with pytest.raises(UsageError, match=rf"'\*=bf16': {B} cannot run bf16: it is fixed"):
        run_plans({BF16: {B: "it is fixed"}}, FP8_JOB, formats=formats, pins="*=bf16")


def test_a_glob_pins_no_linear_that_is_tied_to_one_that_cannot_run_its_option() -> None:
    refusals = {FP8: {B: "its shape is odd"}}
    plans = run_plans(
        refusals, ties=((B, C),), formats="bf16,fp8,fp4", pins="*=fp8", efficiency_target=0.0
    )
    assert options_of(plans.first_plan(None, 0).plan) == ["fp8", "bf16", "bf16"]


def test_a_pin_of_a_tied_linear_holds_for_the_others() -> None:
    ties: Any = {"ties": ((B, C),), "pins": f"{B}=fp4", "efficiency_target": 0.0}
    job = dict.fromkeys((A, B, C), FP8)
    plans = run_plans(job=job, **ties)
    assert plans.config.pins == (f"{B}=fp4", f"{C}=fp4")
    plan = plans.first_plan(None, 0).plan
    assert options_of(plan) == ["fp8", "fp4", "fp4"]
    assert options_of(plans.job_fallback(plan, 9)) == ["fp8", "fp4", "fp4"]
    measured = run_plans(job=job, collect_only=True, **ties)
    assert options_of(measured.first_plan(None, 0).plan) == ["fp8", "fp4", "fp4"]


def test_pins_of_tied_linears_that_contradict_each_other_are_named_as_they_were_given() -> None:
    with pytest.raises(UsageError, match=rf"no plan satisfies: pin {B}=fp8; pin {C}=fp4"):
        first(ties=((B, C),), pins=f"{B}=fp8,{C}=fp4", efficiency_target=0.0)


def test_linears_that_a_glob_ties_in_get_their_pins_in_one_order() -> None:
    """Ranks and resumed runs compare pins as texts."""
    pins = f"{A}=bf16,*.layers.9*=fp8"
    plans = run_plans(ties=((A, C, B),), pins=pins, efficiency_target=0.0)
    assert plans.config.pins == (f"{A}=bf16", f"{B}=bf16", f"{C}=bf16", "*.layers.9*=fp8")


def test_pins_lower_the_default_target() -> None:
    """`--first-last-layers-bf16` of a job becomes such pins."""
    plans = run_plans(pins=f"{C}=bf16")
    assert plans.config.efficiency_target == 0.5
    assert "the efficiency target is 0.5, the highest that" in plans.available.warnings[-1]
    assert run_plans(pins=f"{C}=bf16", policy="uniform-fp8").config.efficiency_target == 0.75
    with pytest.raises(UsageError, match="best reachable target is 0"):
        first(pins="*=bf16")


@pytest.mark.parametrize(
    ("schedule", "targets"),
    [("9:0.25", [0.5, 0.25]), ("0:0.1,9:0.25", [0.1, 0.25])],
)
def test_before_a_schedules_first_point_the_default_target_is_one_that_can_be_reached(
    schedule: str, targets: list[float]
) -> None:
    plans = run_plans(formats="fp8,fp8-fp4-fp4", target_schedule=schedule)
    assert [plans.targets.at(iteration) for iteration in (1, 9)] == targets
    assert plans.first_plan(None, 0).plan is not None

"""Settings that no plan satisfies, and the default target that one can reach."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_snip.errors import InfeasiblePlanError, UsageError
from megatron_snip.linears.te.machine import Machine
from megatron_snip.linears.te.recipe_table import JobPrecision
from megatron_snip.options import BF16, Option
from megatron_snip.planning.calibration import CalibratedLinear, CalibrationTable
from megatron_snip.planning.fixed import Fixed, Source, fixed_pins, summary
from megatron_snip.planning.plan import write_plan
from megatron_snip.planning.planner import make_plan
from megatron_snip.run.feasibility import check_settings
from megatron_snip.run.plans import RunPlans
from tests.unit.planning.build import options_of, plan_of
from tests.unit.run.build import FP4, FP8, FP8_JOB, MXFP8, A, B, C, first, run_plans, state_of


def pinned(plans: RunPlans) -> dict[str, Option]:
    return {name: each.option for name, each in plans.available.fixed.items()}


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
    with pytest.raises(UsageError, match=r"^pins: .* give .* two options") as caught:
        first(pins=f"{A}=fp8,*=fp4", efficiency_target=0.0)
    assert caught.value.field == "pins"


@pytest.mark.parametrize(("balance", "advice"), [("none", "bf16,fp8 reaches 0.75"), ("stage", "")])
def test_formats_are_advised_if_every_stage_that_must_reach_the_target_does(
    balance: str, advice: str
) -> None:
    """The only linear of the first stage is pinned to BF16, whatever the formats."""
    refusals = {FP4: dict.fromkeys((B, C), "its shape")}
    settings = {"pins": f"{A}=bf16", "efficiency_target": 0.5, "pipeline_balance": balance}
    plans = run_plans(refusals, **settings)
    plans.available = replace(plans.available, alternatives={"bf16,fp8": (BF16, FP8)})
    with pytest.raises(UsageError, match="the best reachable target is 0") as refused:
        plans.first_plan(None, 0)
    assert str(refused.value).partition("; --snip-formats ")[2] == advice


@pytest.mark.parametrize(
    ("formats", "machine", "is_advised"),
    [
        ("bf16,fp8", Machine(), False),
        ("bf16,mxfp8", Machine(), True),
        ("bf16,mxfp8", Machine((10, 0), "2.20.2"), False),  # fp8 is mxfp8 there
        ("bf16,fp8_tensorwise", Machine((10, 0), "2.20.2"), True),
    ],
)
def test_the_formats_that_a_run_has_are_not_advised(
    formats: str, machine: Machine, is_advised: bool
) -> None:
    settings: dict[str, Any] = {"pins": f"{C}=bf16", "pipeline_balance": "none"}
    plans = run_plans(formats=formats, job_facts={"machine": machine}, **settings)
    available = replace(plans.available, alternatives={"bf16,fp8": (BF16, FP8)})
    problem = available.problem_without_measurements(0.9)
    available = replace(available, fixed={})  # as if all could be freed
    with pytest.raises(InfeasiblePlanError, match=r"best reachable target is 0\.5") as refused:
        check_settings(problem, plans.config, plans.plan_settings(0), available)
    assert ("--snip-formats bf16,fp8 reaches 1" in str(refused.value)) == is_advised


def test_no_formats_are_advised_where_the_target_counts_time(tmp_path: Path) -> None:
    """Only what the run's own options take was measured."""
    seconds = {name: dict.fromkeys(("fprop", "dgrad", "wgrad"), s) for name, s in TIMES.items()}
    table = CalibrationTable(
        machine="a",
        device="b",
        date="c",
        versions={},
        tokens=1,
        linears=(CalibratedLinear(names="*", out_features=1, in_features=1, seconds=seconds),),
    )
    path = tmp_path / "calibration.json"
    path.write_text(table.model_dump_json())
    refusals = {FP4: {C: "its shape"}}
    settings = {"pins": f"{A}=bf16", "pipeline_balance": "none", "efficiency_target": 0.9}
    times = {"cost": "time", "calibration": path}
    plans = run_plans(refusals, formats="bf16,fp4", **settings, **times)
    plans.available = replace(plans.available, alternatives={"bf16,fp8": (BF16, FP8)})
    with pytest.raises(UsageError, match=r"best reachable target is 0\.5") as refused:
        plans.first_plan(None, 0)
    assert "--snip-formats" not in str(refused.value)


TIMES = {"bf16": 3.0, "fp8": 2.0, "fp4": 1.0}
"""Seconds of a GEMM."""


def test_linears_that_run_the_job_s_option_only_keep_it_and_lower_the_target() -> None:
    refusals = {o: {B: "it is fixed"} for o in (BF16, FP4)}
    plans = run_plans(refusals, FP8_JOB)
    assert plans.config.efficiency_target == 0.75 * 0.75
    problem = plans.available.problem_without_measurements(0.75)
    assert [sorted(row.options) for row in problem.linears] == [
        ["fp4", "fp8"],
        ["fp8"],
        ["fp4", "fp8"],
    ]
    assert "fp4 is not available to 1 linears: it is fixed" in plans.available.warnings
    assert options_of(plans.fitted(plan_of(["fp4"] * 3))[0]) == ["fp4", "fp8", "fp4"]
    refusals |= {FP4: {B: "it is fixed", C: "it is stored"}}
    plans = run_plans(refusals, FP8_JOB)
    assert plans.config.efficiency_target == 0.1875
    assert "the efficiency target is 0.1875, 0.75 of the 0.25 " in plans.available.warnings[-1]
    assert plans.first_plan(None, 0).plan.target <= 0.25
    with pytest.raises(UsageError, match=r"best reachable target is 0\.25"):
        run_plans(refusals, FP8_JOB, efficiency_target=0.75).first_plan(None, 0)


def test_a_glob_pins_the_linears_that_can_run_its_option() -> None:
    refusals = {FP8: {B: "its shape is odd"}}
    plans = run_plans(refusals, formats="bf16,fp8,fp4", pins="*=fp8", efficiency_target=0.0)
    assert options_of(plans.first_plan(None, 0).plan) == ["fp8", "bf16", "fp8"]
    assert pinned(plans) == {A: FP8, B: BF16, C: FP8}
    assert f"pin *=fp8: 1 of 3 linears run bf16 instead: {B}: its shape is odd" in (
        plans.available.warnings
    )
    for pins in (f"{B}=fp8", "*.layers.1.*=fp8"):  # no linear of theirs can run it
        with pytest.raises(UsageError, match=rf"{B} cannot run fp8: its shape is odd"):
            first(refusals=refusals, formats="bf16,fp8,fp4", pins=pins)


@pytest.mark.parametrize("option", ["mxfp8", "fp4"])
def test_a_linear_that_runs_the_job_s_option_only_keeps_it_under_a_glob(option: str) -> None:
    refusals = {Option.parse(o): {B: "it is fixed"} for o in ("bf16", "mxfp8", "fp4")}
    plans = run_plans(
        refusals, FP8_JOB, formats="mxfp8,fp4", pins=f"*={option}", efficiency_target=0.0
    )
    assert pinned(plans) == {A: Option.uniform(option), B: FP8, C: Option.uniform(option)}
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
    assert pinned(plans) == {B: FP4, C: FP4}
    assert plans.available.fixed[C].source is Source.TIE
    plan = plans.first_plan(None, 0).plan
    assert options_of(plan) == ["fp8", "fp4", "fp4"]
    assert options_of(plans.job_fallback(plan, 9)) == ["fp8", "fp4", "fp4"]
    measured = run_plans(job=job, collect_only=True, **ties)
    assert options_of(measured.first_plan(None, 0).plan) == ["fp8", "fp4", "fp4"]


def test_pins_of_tied_linears_that_contradict_each_other_are_named_as_they_were_given() -> None:
    with pytest.raises(UsageError, match=rf"'{B}=fp8' and '{C}=fp4' give {C} two options"):
        first(ties=((B, C),), pins=f"{B}=fp8,{C}=fp4", efficiency_target=0.0)


def test_linears_that_a_pin_ties_in_get_theirs_in_one_order() -> None:
    """Ranks and resumed runs compare pins as texts."""
    plans = run_plans(ties=((A, C, B),), pins=f"{A}=bf16", efficiency_target=0.0)
    layers = [f"decoder.layers.{i}.*" for i in (1, 2)]
    assert plans.available.pins == ((A, "bf16"), *((glob, "bf16") for glob in layers))


RULES = {A: Source.FILE, C: Source.EDGE}
"""Of the job: what its precision file and its first and last layers fix."""


def test_what_the_job_s_own_rules_fix_stays_as_the_job_runs_it() -> None:
    """Also where it is no option of the run, which is then not measured."""
    job = {A: MXFP8, B: FP8, C: BF16}
    plans = run_plans(job=job, rules=RULES, efficiency_target=0.0)
    assert {name: (str(f.option), f.source) for name, f in plans.available.fixed.items()} == {
        A: ("mxfp8", Source.FILE),
        C: ("bf16", Source.EDGE),
    }
    lowest = plans.first_plan(None, 0).plan
    assert options_of(lowest) == ["mxfp8", "fp8", "bf16"]
    (first, second, third) = plans.available.problem_without_measurements(0.0).linears
    assert first.options["mxfp8"].quality_loss == 0.0
    assert list(second.options) == list(third.options) == ["fp8", "fp4"]
    made = make_plan(plans.available.problem_without_measurements(0.25), plans.plan_settings(0))
    assert options_of(made) == ["mxfp8", "fp4", "bf16"]
    fallback = plans.job_fallback(made, 9)
    assert options_of(fallback) == ["mxfp8", "fp8", "bf16"]
    fitted, replaced = plans.fitted(plan_of(["fp4", "fp4", "fp4"]))
    assert options_of(fitted) == ["mxfp8", "fp4", "bf16"]
    assert [each.reason for each in replaced] == [Source.FILE, Source.EDGE]


def test_the_default_target_counts_what_fixed_linears_save_anyway() -> None:
    """Else the others could all have the highest precision."""
    job = {A: FP8, B: FP8, C: FP4}
    plans = run_plans(job=job, rules={C: Source.FILE})
    assert plans.config.efficiency_target == 0.5 + 0.75 * 0.5
    text = "is 0.875, 0.75 of the 0.5 that linears can reach above the 0.5 of fixed linears"
    assert any(text in each for each in plans.available.warnings)


def test_a_pin_goes_before_the_job_s_own_rules_and_free_gives_linears_back() -> None:
    plans = run_plans(rules=RULES, pins=f"{A}=fp8,{C}=free", efficiency_target=0.0)
    assert pinned(plans) == {A: FP8}
    assert plans.available.fixed[A].source is Source.PIN
    assert not any("frees nothing" in text for text in plans.available.warnings)
    assert plans.available.unused_rules == ()
    plans = run_plans(rules=RULES, pins=f"{B}=free,{C}=free", efficiency_target=0.0)
    assert plans.available.unused_rules == (f"--snip-pins: {B}=free",)
    plans = run_plans(rules=RULES, pins=f"{B}=free", efficiency_target=0.0)
    assert pinned(plans) == {A: BF16, C: BF16}
    assert f"--snip-pins {B}=free frees nothing" in "".join(plans.available.warnings)
    with pytest.raises(UsageError, match="no linear's name matches"):
        run_plans(pins="*.layers.9.*=free")


def test_small_linears_keep_what_the_job_runs_if_the_user_says_so(caplog: Any) -> None:
    """A is pinned; B is small, and C is not."""
    blackwell = {
        "backend": "te",
        "machine": Machine((10, 0), "2.20", job=JobPrecision("fp8", "e4m3", "mxfp8")),
        "shard_shapes": {A: (64, 64), B: (1280, 8192), C: (8192, 8192)},
    }
    mxfp8 = dict.fromkeys((A, B, C), FP8)

    def plans(**config: Any) -> RunPlans:
        given = {"formats": "fp8,fp4", "efficiency_target": 0.0, **config}
        ties = given.pop("ties", ())
        return run_plans(job=mxfp8, ties=ties, job_facts=blackwell, **given)

    def about(**config: Any) -> list[str]:
        return list(plans(**config).available.hints)

    (line,) = about(pins=f"{A}=fp4")
    assert line.startswith("1 linears are small, and fp4 may be slower there than bf16")
    assert f"{B}; the first has N 1280, K 8192 on a rank (N <= 2048). --snip-cost time" in line
    assert line.endswith("--snip-small-linears job keeps what the job runs")
    assert about(pins=f"{A}=fp4", collect_only=True) == []
    (line,) = about(formats="bf16,fp8")
    assert line.startswith("2 linears") and line.endswith(f"--snip-pins {A}=bf16 takes one out")
    assert about(small_linears="job") == []
    fixed = plans(small_linears="job", ties=((B, C),), pins=f"{A}=free").available.fixed
    assert {name: (str(each.option), each.source) for name, each in fixed.items()} == {
        B: ("fp8", Source.SMALL),
        C: ("fp8", Source.TIE),
    }
    found = plans(small_linears="job", formats="bf16,fp8").available
    assert (found.fixed, found.unused_rules) == ({}, ("--snip-small-linears job",))


def test_a_linear_that_is_fused_with_a_fixed_one_is_fixed() -> None:
    plans = run_plans(rules=RULES, ties=((A, B),), efficiency_target=0.0)
    assert pinned(plans) == {A: BF16, B: BF16, C: BF16}
    assert plans.available.fixed[B].source is Source.TIE


@pytest.mark.parametrize(
    "rules", [{A: Source.FILE, B: Source.FILE}, {B: Source.FILE}], ids=["both", "one"]
)
def test_fused_linears_are_free_only_together(rules: dict[str, Source]) -> None:
    plans = run_plans(rules=rules, ties=((A, B),), pins=f"{A}=free", efficiency_target=0.0)
    assert pinned(plans) == {A: BF16, B: BF16}
    (line,) = [text for text in plans.available.warnings if "free" in text]
    assert line == (
        f"--snip-pins {A}=free does not free {A}: the operations of {A} are fused with those of "
        f"{B}, which --te-precision-config-file fixes; free both"
    )
    assert plans.available.unused_rules == (f"--snip-pins: {A}=free",)
    both = run_plans(rules=rules, ties=((A, B),), pins=f"{A}=free,{B}=free", efficiency_target=0.0)
    assert pinned(both) == {}
    of_pin = run_plans(ties=((A, B),), pins=f"*=free,{B}=fp8", efficiency_target=0.0)
    assert pinned(of_pin) == {A: FP8, B: FP8}
    assert not any("does not free" in text for text in of_pin.available.warnings)


def test_a_linear_that_can_run_only_what_the_job_runs_counts_as_fixed() -> None:
    refusals = {o: {B: "weights are stored in mxfp8"} for o in (BF16, FP4)}
    plans = run_plans(refusals, FP8_JOB)
    assert {name: f.source for name, f in plans.available.fixed.items()} == {B: Source.LIMIT}
    assert plans.available.pins == ()  # what it can run decides
    assert summary(plans.available.fixed, 3) == (
        f"1 of 3 linears are fixed: 1 by stored weights or shapes (such as {B}=fp8)"
    )


def test_a_plan_file_against_the_job_s_own_rules_is_refused_with_the_flag_that_frees(
    tmp_path: Path,
) -> None:
    path = tmp_path / "plan.json"
    write_plan(plan_of(["fp4", "fp4", "fp4"]), path)
    wanted = rf"the plan breaks --te-precision-config-file at 1 of 3 linears: {A}; .*--snip-pins"
    with pytest.raises(UsageError, match=wanted):
        first(rules=RULES, plan_file=path)
    with pytest.raises(UsageError, match="the plan breaks --first-last-layers-bf16 at 1 of 3"):
        first(rules=RULES, plan_file=path, pins=f"{A}=free")
    assert first(rules=RULES, plan_file=path, pins="*=free") == ["fp4"] * 3


def test_a_changed_rule_of_the_job_is_a_changed_setting_of_a_resumed_run() -> None:
    before = run_plans(rules=RULES, efficiency_target=0.0)
    state = replace(state_of(plan_of(["bf16", "fp4", "bf16"])), settings=before.reported_settings())
    same = run_plans(rules=RULES, efficiency_target=0.0).first_plan(state, 0, 6)
    assert same.new_settings == frozenset()
    other = run_plans(rules={A: Source.FILE}, efficiency_target=0.0).first_plan(state, 0, 6)
    assert other.new_settings == {"pins"}


def test_pins_become_the_fewest_that_say_the_same() -> None:
    names = [
        f"{block}.layers.{i}.mlp.linear_fc{k}"
        for block in ("decoder", "mtp.layers.0.inner")
        for i in range(2)
        for k in (1, 2)
    ]
    names += ["mtp.layers.0.mlp.linear_fc1"]
    fixed = {name: Fixed(BF16, Source.EDGE) for name in names if "inner" not in name}
    fixed[names[3]] = Fixed(FP8, Source.PIN)
    assert fixed_pins(fixed, names, [("*.1.*fc2", FP8), (names[3], FP8)]) == (
        (names[3], "fp8"),
        ("decoder.layers.0.*", "bf16"),
        (names[2], "bf16"),
        # `mtp.layers.0.*` would match the layers within
        ("mtp.layers.0.mlp.linear_fc1", "bf16"),
    )


def test_pins_lower_the_default_target() -> None:
    plans = run_plans(pins=f"{C}=bf16")
    assert plans.config.efficiency_target == 0.375
    assert "the efficiency target is 0.375, 0.75 of the 0.5 " in plans.available.warnings[-1]
    assert run_plans(pins=f"{C}=bf16", policy="uniform-fp8").config.efficiency_target == 0.75
    with pytest.raises(UsageError, match=r"nothing is left to plan .*3 of 3 .* by --snip-pins"):
        first(pins="*=bf16")
    with pytest.raises(UsageError, match="best reachable target is 0"):
        first(pins="*=bf16", efficiency_target=0.5)


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

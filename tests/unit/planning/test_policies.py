"""Constraints, what an infeasible problem reports, and policies, which all meet the constraints."""

import itertools
from collections.abc import Collection
from dataclasses import replace

import numpy as np
import pytest

from megatron_snip.config import SnipConfig
from megatron_snip.divergence.quality_loss import divergence_table, planning_problem
from megatron_snip.errors import InfeasiblePlanError, UsageError
from megatron_snip.options import Granularity, enumerate_options
from megatron_snip.planning.constraints import assignment_of_most_gain
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.planning.planner import make_plan
from megatron_snip.planning.policies import POLICIES, get_policy, policy_names
from megatron_snip.planning.problem import LinearChoices, OptionCost, PlanningProblem
from megatron_snip.planning.settings import PlanSettings
from tests.unit.divergence.build import errors, linear, table
from tests.unit.planning.build import MODULES, constraints_of, name_of, options_of, problem_of
from tests.unit.planning.instances import random_instance
from tests.unit.planning.oracle import brute_force

LOSSES = [[0.0, 1.0]] * 4
FORBIDDEN = "forbidden options"


def options_under(problem: PlanningProblem, **settings: object) -> list[str]:
    return options_of(make_plan(problem, PlanSettings(**settings)))


def conflict(problem: PlanningProblem, **settings: object) -> InfeasiblePlanError:
    with pytest.raises(InfeasiblePlanError) as caught:
        make_plan(problem, PlanSettings(**settings))
    assert "\n" not in str(caught.value)
    return caught.value


def test_pins_fix_the_linears_that_match() -> None:
    pins = (("decoder.layers.[23].*", "fp4-fp4-fp4"), ("*.layers.3.*", "fp4"))
    assert options_under(problem_of(LOSSES), pins=pins) == ["fp8", "fp8", "fp4", "fp4"]
    # bf16 may be pinned where the problem does not list it.
    pins = (("*.layers.0.*", "bf16"),)
    assert options_under(problem_of(LOSSES, target=0.75), pins=pins) == [
        "bf16",
        "fp4",
        "fp4",
        "fp4",
    ]


def test_pins_that_cannot_be_met_are_usage_errors() -> None:
    problem = problem_of(LOSSES)
    with pytest.raises(UsageError, match="no linear's name matches"):
        options_under(problem, pins=(("encoder.*", "fp8"),))
    with pytest.raises(UsageError, match=r"'fp3' is not an option .*fp8, fp4"):
        options_under(problem, pins=(("*", "fp3"),))


def test_only_stages_that_conflict_are_named() -> None:
    problem = problem_of([[0.0, 1.0], [0.0, 1.0], [0.0, None]], target=0.5, stages=[0, 1, 1])
    error = conflict(problem, pipeline_balance="stage", pins=(("*.layers.1.*", "fp8"),))
    assert error.conflicts == ("target 0.5 in stage 1", "pin *.layers.1.*=fp8", FORBIDDEN)
    assert error.best_target == 0.0


def test_the_best_target_is_read_also_where_many_pins_conflict() -> None:
    """Lines are cut at 500 characters where training goes on."""
    pins = tuple((name_of(layer), "fp8") for layer in range(20))
    error = conflict(problem_of([[0.0, 1.0]] * 20, target=0.05), pins=pins)
    assert len(error.conflicts) == 21
    assert str(error).endswith("; 13 more; the best reachable target is 0")
    assert len(str(error)) < 500


def test_linears_without_an_option_are_named() -> None:
    error = conflict(problem_of([[0.0, 1.0], [None, None]], target=0.0))
    assert (error.conflicts, error.best_target) == ((FORBIDDEN,), None)
    assert name_of(1) in str(error)
    forbidden = problem_of([[0.0, None], [0.0, 1.0]], target=0.0)
    error = conflict(forbidden, pins=(("*.layers.0.*", "fp4"),))
    assert error.conflicts == ("pin *.layers.0.*=fp4", FORBIDDEN)
    pins = (("*.layers.0.*", "fp8"), ("*.layers.0.*", "fp4"), ("*", "fp4"))
    error = conflict(problem_of(LOSSES, target=0.0), pins=pins)
    assert "pin *.layers.0.*=fp8" in error.conflicts and len(error.conflicts) == 2
    assert "no target can be reached" in str(error)


def test_pins_that_conflict_are_named_where_a_pin_to_bf16_helps_another_linear() -> None:
    """Without its pin the second linear would have no option."""
    pins = (("*.layers.0.*", "fp8"), ("*", "bf16"))
    error = conflict(problem_of([[0.0, 1.0], [None, None]], target=0.0), pins=pins)
    assert error.conflicts == ("pin *.layers.0.*=fp8", "pin *=bf16")


def test_reported_conflicts_are_minimal_and_the_best_target_is_the_largest() -> None:
    checked = 0
    for seed in range(150):
        instance = random_instance(seed)
        problem, settings = instance.problem, instance.settings
        if brute_force(problem, settings) is not None:
            continue
        error = conflict(problem, **settings.model_dump())
        constraints = constraints_of(problem, **settings.model_dump())
        for left_out in (None, *error.conflicts):
            active = [label for label in error.conflicts if label != left_out]
            feasible = assignment_of_most_gain(constraints.task(active)) is not None
            assert feasible == (left_out is not None), (seed, left_out)
        if error.best_target is not None:
            best = settings.model_copy(update={"target": error.best_target})
            make_plan(problem, best)
            make_plan(
                problem, settings.model_copy(update={"target": float(str(error).split()[-1])})
            )
            beyond = settings.model_copy(update={"target": error.best_target + 1e-6})
            assert brute_force(problem, beyond) is None
        checked += 1
    assert checked > 20


LINEARS = (
    *("random", "min-abs-err", "min-rel-err", "norms", "layer-type", "layer-id", "last-blocks"),
    "error-threshold",
)
"""They lower one linear after the other."""
GEMMS = ("random-gemm", "grads-first", "norms-gemm", "norms-kinds")
NORMS = ("norms_fprop", "norms_dgrad", "norms_wgrad")


def problem_in_layers(
    layers: int, target: float = 0.6, seed: int | None = None, granularity: Granularity = "linear"
) -> PlanningProblem:
    """Four linears a layer, equal ones without a seed; a quality loss grows with the saving."""
    random, linears = np.random.default_rng(seed), []
    for layer, kind in itertools.product(range(layers), MODULES):
        flops = 1.0 if seed is None else float(random.integers(1, 9))
        loss, score = (1.0, 1.0) if seed is None else random.lognormal(0, 1, 2)
        options = {}
        for option in enumerate_options(("fp8", "fp4"), granularity):
            share, scores = option.share_in("fp4"), {"abs_error": score, "rel_error": score}
            scores |= {"norms": share * score}
            for norms, gemm_format in zip(NORMS, option.formats, strict=True):
                scores[norms] = score * (gemm_format == "fp4")
            options[str(option)] = OptionCost(
                quality_loss=share * loss, saving=share, scores=scores
            )
        name = name_of(layer, kind)
        statistics = statistics_of(score, score, score)
        values = {"stage": layer // 3, "flops": flops, "options": options}
        linears.append(LinearChoices(name=name, statistics=statistics, **values))
    return PlanningProblem(linears=tuple(linears), target=target)


def statistics_of(x: float | None, w: float | None, g: float | None) -> dict[str, float | None]:
    """What fp4's relative errors of X, W and G come from."""
    found: dict[str, float | None] = dict.fromkeys(["input_square", "weight_square"], 4.0)
    found["grad_square"] = 0.25
    for name, error in (("input", x), ("weight", w), ("grad", g)):
        square = found[f"{name}_square"] or 0.0
        found[f"fp4.{name}_error_square"] = None if error is None else error**2 * square
    return found


def plan_under(policy: str, problem: PlanningProblem, **settings: object) -> PrecisionPlan:
    return make_plan(problem, PlanSettings(policy=policy, **settings))


def lowered(policy: str, problem: PlanningProblem, target: float) -> list[str]:
    made = plan_under(policy, problem, target=target)
    return [name for name, option in made.linears.items() if str(option) == "fp4"]


def layers_of(names: Collection[str]) -> set[int]:
    return {int(name.split(".")[2]) for name in names}


def test_policies_are_found_by_name_and_state_what_they_are() -> None:
    assert {"snip", *LINEARS, *GEMMS, "uniform-OPTION"} <= set(policy_names())
    uniform = get_policy("uniform-fp8")
    assert (uniform.needs_statistics, uniform.heeds_target) == (False, False)
    for name in ("", "snap", "uniform-", "uniform", "greedy", "none"):
        with pytest.raises(UsageError, match="known: snip"):
            get_policy(name)
    for name in GEMMS:
        with pytest.raises(UsageError, match="orders GEMMs"):
            plan_under(name, problem_in_layers(2))


@pytest.mark.parametrize("name", POLICIES)
def test_measured_numbers_decide_the_plans_of_policies_that_need_them(name: str) -> None:
    def planned(seed: int) -> PrecisionPlan:
        problem = problem_in_layers(6, seed=seed, granularity="gemm")
        flops = {row.name: row.flops for row in problem_in_layers(6, seed=0).linears}
        rows = [row.model_copy(update={"flops": flops[row.name]}) for row in problem.linears]
        return plan_under(name, problem.model_copy(update={"linears": tuple(rows)}))

    is_same = planned(0).digest == planned(1).digest
    assert is_same != POLICIES[name].needs_statistics


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("policy", "granularity"),
    [*itertools.product(("snip", *LINEARS, *GEMMS), ("gemm",)), *((p, "linear") for p in LINEARS)],
)
def test_the_target_is_exceeded_by_less_than_what_is_lowered_last(
    policy: str, granularity: Granularity, seed: int
) -> None:
    target = 0.4 + 0.2 * float(np.random.default_rng(seed).random())
    problem = problem_in_layers(6, target, seed, granularity)
    for pins, balance in itertools.product(((), (("*.layers.2.*", "fp8"),)), ("none", "stage")):
        made = plan_under(policy, problem, seed=seed, pins=pins, pipeline_balance=balance)
        groups = [made.efficiency] if balance == "none" else made.stages
        for stage, efficiency in enumerate(groups):
            flops = [x.flops for x in problem.linears if balance == "none" or x.stage == stage]
            largest = max(flops) / sum(flops) / (3 if granularity == "gemm" else 1)
            assert target - 1e-9 <= efficiency < target + largest


@pytest.mark.parametrize("policy", ["snip", *LINEARS])
def test_every_constraint_holds(policy: str) -> None:
    problem = problem_in_layers(6, seed=0)
    pins = (("*.layers.3.*", "bf16"), ("*.layers.5.*", "fp4"))
    for balance in ("none", "stage"):  # make_plan has every plan checked
        plan_under(policy, problem, pipeline_balance=balance, pins=pins, target=0.5)
    with pytest.raises(InfeasiblePlanError) as caught:
        plan_under(policy, problem, target=0.9, pins=(("*.layers.[45].*", "fp8"),))
    flops = [linear.flops for linear in problem.linears]
    assert caught.value.best_target == pytest.approx(sum(flops[:16]) / sum(flops))


def test_rules_of_practice() -> None:
    low = layers_of(lowered("last-blocks", problem_in_layers(62), 52 / 62))
    assert set(range(62)) - low == {0, 1, *range(54, 62)}  # NVIDIA's 12B model
    low = layers_of(lowered("last-blocks", problem_in_layers(12), 9 / 12))
    assert set(range(12)) - low == {0, 10, 11}
    made = plan_under("grads-first", problem_in_layers(6, granularity="gemm"), target=7 / 9)
    assert {o.formats[1:] for o in made.linears.values()} == {("fp4", "fp4")}
    assert layers_of([n for n, o in made.linears.items() if o.fprop == "fp4"]) == {2, 3}


def test_layer_policies_protect_fc2_and_the_outer_layers() -> None:
    problem = problem_in_layers(3)
    assert lowered("layer-type", problem, 3 / 12) == [name_of(i, MODULES[2]) for i in range(3)]
    protected = set(problem.names) - set(lowered("layer-type", problem, 9 / 12))
    assert protected == {name_of(i, MODULES[3]) for i in range(3)}
    assert layers_of(lowered("layer-id", problem_in_layers(12), 0.5)) == {3, 4, 5, 6, 7, 8}
    rows = [
        row.model_copy(update={"name": f"n{i}"})
        for i, row in enumerate(problem_in_layers(1).linears)
    ]
    without = problem.model_copy(update={"linears": tuple(rows)})
    assert lowered("layer-id", without, 0.5) == ["n1", "n2"]  # position instead of layer


@pytest.mark.parametrize(
    ("policy", "score"), [("min-abs-err", "abs_error"), ("min-rel-err", "rel_error")]
)
def test_local_errors_are_lowered_smallest_first_and_unknown_ones_last(
    policy: str, score: str
) -> None:
    scores = [{score: error} for error in (0.3, None, 0.1, None)]
    problem = problem_of([[0.0, 1.0]] * 4, scores=scores)
    assert lowered(policy, problem, 0.25) == [name_of(2)]
    assert lowered(policy, problem, 0.5) == [name_of(0), name_of(2)]
    assert lowered(policy, problem, 0.75) == [name_of(0), name_of(1), name_of(2)]
    with pytest.raises(UsageError, match=f"needs the score '{score}'"):
        plan_under(policy, problem_of([[0.0, 1.0]] * 2))


THRESHOLDS = [(0.2, 0.1, 0.4), (0.1, 0.3, 0.1), (0.1, 0.1, 0.2), (0.1, None, 0.1)]
"""Relative errors of X, W and G at four linears."""


def problem_with_errors(granularity: Granularity) -> PlanningProblem:
    linears = []
    for row, found in zip(problem_in_layers(1).linears, THRESHOLDS, strict=True):
        shares = {str(o): o.share_in("fp4") for o in enumerate_options(("fp8", "fp4"), granularity)}
        options = {name: OptionCost(quality_loss=0.0, saving=s) for name, s in shares.items()}
        update = {"options": options, "statistics": statistics_of(*found)}
        linears.append(row.model_copy(update=update))
    return PlanningProblem(linears=tuple(linears), target=0.5)


def test_operands_below_the_threshold_that_the_target_needs_are_low() -> None:
    problem = problem_with_errors("linear")
    names = problem.names
    assert lowered("error-threshold", problem, 0.25) == [names[2]]  # 0.2; the largest decides
    assert lowered("error-threshold", problem, 0.5) == [names[1], names[2]]  # 0.3
    assert lowered("error-threshold", problem, 0.75) == [*names[:3]]  # 0.4, unknown ones last
    # By GEMM: fprop has X and W, dgrad G and W, wgrad G and X.
    made = plan_under("error-threshold", problem_with_errors("gemm"), target=6 / 12)
    assert [str(option) for option in made.linears.values()] == [
        "fp4-fp8-fp8",  # 0.2, 0.4, 0.4
        "fp8-fp8-fp4",  # 0.3, 0.3, 0.1
        "fp4",  # 0.1, 0.2, 0.2
        "fp8-fp8-fp4",  # unknown, unknown, 0.1
    ]
    with pytest.raises(UsageError, match=r"needs the statistic 'fp4\.input_error_square' of"):
        plan_under("error-threshold", problem_of([[0.0, 1.0]] * 2))


@pytest.mark.parametrize(
    ("policy", "weights", "classes"),
    [
        ("norms-gemm", (1.0, 1.0, 1.0), (1, 0, 0)),  # dgrad and wgrad stand before fprop
        ("norms-kinds", (1.0, 0.024, 0.051), (0, 0, 0)),
    ],
)
@pytest.mark.parametrize("target", [0.3, 0.75, 0.9])
def test_gemms_are_lowered_in_the_order_of_their_bounds_by_norms(
    policy: str, weights: tuple[float, ...], classes: tuple[int, ...], target: float
) -> None:
    """From norms of operands and errors: the paper's bound for each GEMM, by hand."""
    random = np.random.default_rng(7)
    rows = []
    places: list[tuple[int, float, str, int]] = []
    for index in range(9):
        x, w, g, ex, ew, eg = random.lognormal(0, 1, 6)
        found = linear(
            index,
            fp8=errors(0.01),
            fp4=errors(1.0, input_error_square=ex**2, weight_error_square=ew**2,
                       grad_error_square=eg**2),
        )  # fmt: skip
        flops = float(random.integers(1, 5)) * 3
        found = replace(
            found, input_square=x**2, weight_square=w**2, grad_square=g**2, flops_per_token=flops
        )
        rows.append(found)
        bounds = (g * (x * ew + ex * w), x * (g * ew + eg * w), w * (g * ex + eg * x))
        for k, bound in enumerate(bounds):
            places.append((classes[k], weights[k] * bound / flops, found.name, k))
    low: dict[str, set[int]] = {row.name: set() for row in rows}
    missing = target * sum(row.flops_per_token for row in rows)
    flops_of = {row.name: row.flops_per_token for row in rows}
    for _, _, name, k in sorted(places):
        if missing > 1e-9:
            missing -= flops_of[name] / 3
            low[name].add(k)
    table_of_options = divergence_table(
        table(*rows), enumerate_options(("fp8", "fp4"), "gemm"), "fp4", SnipConfig()
    )
    made = plan_under(policy, planning_problem(table_of_options, target))
    found_low = {
        name: {k for k, gemm_format in enumerate(option.formats) if gemm_format == "fp4"}
        for name, option in made.linears.items()
    }
    assert found_low == low


def test_policies_by_norms_need_their_scores_and_options_per_gemm() -> None:
    problem = problem_in_layers(2, granularity="gemm")
    bare = [
        row.model_copy(
            update={"options": {
                name: cost.model_copy(update={"scores": {}}) for name, cost in row.options.items()
            }}
        )
        for row in problem.linears
    ]  # fmt: skip
    for policy in ("norms-gemm", "norms-kinds"):
        with pytest.raises(UsageError, match="needs the score 'norms_fprop'"):
            plan_under(policy, problem.model_copy(update={"linears": tuple(bare)}))


def test_uniform_policies_ignore_the_target_and_respect_pins() -> None:
    problem = problem_of([[0.5, 1.0], [0.25, None]], target=0.75)
    made = plan_under("uniform-fp4", problem_of([[0.5, 1.0], [0.25, 2.0]], 0.75))
    assert options_of(made) == ["fp4", "fp4"]
    assert (made.status, made.target, made.objective, made.bound) == ("fixed", 0.0, 3.0, 3.0)
    assert options_of(plan_under("uniform-bf16", problem)) == ["bf16", "bf16"]
    pinned = plan_under("uniform-fp4", problem, pins=((name_of(1), "fp8"),))
    assert options_of(pinned) == ["fp4", "fp8"]
    with pytest.raises(InfeasiblePlanError) as caught:
        plan_under("uniform-fp4", problem)
    assert caught.value.conflicts == ("policy uniform-fp4", "forbidden options")
    assert f"no option is left for {name_of(1)}" in str(caught.value)
    with pytest.raises(UsageError, match="fp3"):
        plan_under("uniform-fp3", problem)


def test_uniform_policies_give_linears_without_the_option_no_lower_precision() -> None:
    problem = problem_of([[0.0, 1.0]] * 3)
    first, second, third = problem.linears
    only = {name: {name: first.options[name]} for name in ("fp8", "fp4")}
    linears = (
        first,
        *(
            r.model_copy(update={"options": o})
            for r, o in ((second, only["fp8"]), (third, only["fp4"]))
        ),
    )
    problem = problem.model_copy(update={"linears": linears})
    assert options_of(plan_under("uniform-fp4", problem)) == ["fp4", "fp8", "fp4"]
    assert options_of(plan_under("uniform-fp8", problem)) == ["fp8", "fp8", "bf16"]

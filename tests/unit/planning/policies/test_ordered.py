import math

import pytest

from megatron_snip.errors import UsageError
from megatron_snip.planning.planner import make_plan
from megatron_snip.planning.problem import LinearChoices, OptionCost, PlanningProblem
from megatron_snip.planning.settings import PlanSettings
from tests.unit.planning.build import name_of, options_of, problem_of

KINDS = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)


def model(layers: int) -> PlanningProblem:
    options = {
        "fp8": OptionCost(quality_loss=0.0, saving=0.0),
        "fp4": OptionCost(quality_loss=1.0, saving=1.0),
    }
    linears = tuple(
        LinearChoices(name=name_of(layer, kind), stage=0, flops=1.0, options=options)
        for layer in range(layers)
        for kind in KINDS
    )
    return PlanningProblem(linears=linears, target=0.5)


def lowered(policy: str, problem: PlanningProblem, target: float, **settings: object) -> list[str]:
    metrics = settings.pop("metrics", None)
    step = settings.pop("step", 0)
    rules = PlanSettings(policy=policy, target=target, **settings)
    plan = make_plan(problem, rules, None, step, metrics)
    return [name for name, option in plan.linears.items() if str(option) == "fp4"]


def test_layer_type_protects_fc2_longest_and_lowers_fc1_first() -> None:
    problem = model(3)
    assert lowered("layer-type", problem, 3 / 12) == [name_of(i, KINDS[2]) for i in range(3)]
    protected = set(problem.names) - set(lowered("layer-type", problem, 9 / 12))
    assert protected == {name_of(i, KINDS[3]) for i in range(3)}
    assert lowered("layer-type", problem, 1 / 12) == [name_of(0, KINDS[2])]


def test_layer_id_protects_both_ends() -> None:
    problem = model(12)
    names = lowered("layer-id", problem, 0.5)
    assert {int(name.split(".")[2]) for name in names} == {3, 4, 5, 6, 7, 8}
    assert {int(n.split(".")[2]) for n in lowered("layer-id", problem, 8 / 48)} == {5, 6}


def test_layer_id_takes_the_place_in_the_file_where_names_tell_no_layer() -> None:
    problem = model(1)
    linears = tuple(
        linear.model_copy(update={"name": f"part{i}"}) for i, linear in enumerate(problem.linears)
    )
    problem = problem.model_copy(update={"linears": linears})
    assert lowered("layer-id", problem, 0.5) == ["part1", "part2"]


def test_random_depends_on_seed_and_step_alone() -> None:
    problem = model(8)
    first = lowered("random", problem, 0.5)
    assert lowered("random", problem, 0.5) == first
    assert lowered("random", problem, 0.5, seed=1) != first
    assert lowered("random", problem, 0.5, step=1) != first


@pytest.mark.parametrize(
    ("policy", "metric"), [("min-abs-err", "abs_error"), ("min-rel-err", "rel_error")]
)
def test_local_errors_are_lowered_smallest_first_and_broken_ones_last(
    policy: str, metric: str
) -> None:
    problem = problem_of([[0.0, 1.0]] * 4)
    errors = [0.3, math.nan, 0.1, None]
    metrics = {
        name_of(i): {"fp4": {metric: error}, "fp8": {metric: 0.0}} for i, error in enumerate(errors)
    }
    assert lowered(policy, problem, 0.25, metrics=metrics) == [name_of(2)]
    assert lowered(policy, problem, 0.5, metrics=metrics) == [name_of(0), name_of(2)]


def test_local_errors_must_be_there() -> None:
    problem = problem_of([[0.0, 1.0]] * 2)
    with pytest.raises(UsageError, match="--statistics"):
        make_plan(problem, PlanSettings(policy="min-abs-err"))
    incomplete = {name_of(0): {"fp4": {"abs_error": 1.0}}}
    with pytest.raises(UsageError, match=name_of(1)):
        make_plan(problem, PlanSettings(policy="min-abs-err"), metrics=incomplete)


def test_a_linear_goes_to_its_lowest_option_at_once() -> None:
    problem = problem_of([[0.0, 1.0, 2.0]] * 2, 0.5, ("bf16", "fp4-fp8-fp8", "fp4"))
    assert set(options_of(make_plan(problem, PlanSettings(policy="random")))) == {"bf16", "fp4"}

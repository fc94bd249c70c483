import pytest

from megatron_snip.errors import InfeasiblePlanError, UsageError
from megatron_snip.planning.reach import most_gain
from megatron_snip.planning.rules import FORBIDDEN, needs_bf16
from megatron_snip.planning.settings import PlanSettings
from tests.unit.planning.build import name_of, problem_of, rules_of
from tests.unit.planning.test_reach import SEEDS, rules

LOSSES = [[0.0, 1.0]] * 4


def conflict(rules_: object) -> InfeasiblePlanError:
    with pytest.raises(InfeasiblePlanError) as caught:
        rules_.checked_task()
    assert "\n" not in str(caught.value)
    return caught.value


def test_pins_fix_what_their_glob_matches() -> None:
    task = rules_of(problem_of(LOSSES), pins=(("decoder.layers.[01].*", "fp4"),)).task()
    assert task.allowed.tolist() == [[False, True, False]] * 2 + [[True, True, False]] * 2


def test_pins_that_match_nothing_or_want_the_impossible_are_bad_input() -> None:
    with pytest.raises(UsageError, match="no linear's name matches"):
        rules_of(problem_of(LOSSES), pins=(("encoder.*", "fp8"),))
    with pytest.raises(UsageError, match="'fp3' is not among the options") as caught:
        rules_of(problem_of(LOSSES), pins=(("*", "fp3"),))
    assert "fp8, fp4" in str(caught.value)


def test_bf16_may_be_pinned_without_being_listed() -> None:
    settings = PlanSettings(pins=(("*.layers.0.*", "bf16"),))
    assert needs_bf16(settings)
    assert not needs_bf16(PlanSettings(pins=(("*", "fp8"),)))
    task = rules_of(problem_of(LOSSES), pins=settings.pins).task()
    assert task.allowed[0].tolist() == [False, False, True]


def test_pins_that_disagree_conflict_whatever_comes_after_them() -> None:
    pins = (("*.layers.0.*", "fp8"), ("*.layers.0.*", "fp4"), ("*", "fp4"))
    error = conflict(rules_of(problem_of(LOSSES, target=0.0), pins=pins))
    assert "pin *.layers.0.*=fp8" in error.conflicts
    assert len(error.conflicts) == 2
    assert error.best_target is None
    assert "no target can be reached" in str(error)


def test_pins_that_agree_do_not_conflict() -> None:
    pins = (("*.layers.0.*", "fp4"), ("*", "fp4-fp4-fp4"))
    rules_of(problem_of(LOSSES), pins=pins).checked_task()


def test_first_and_last_layers_are_counted_by_block() -> None:
    rules_ = rules_of(problem_of(LOSSES), first_layers=(1, "fp8"), last_layers=(2, "bf16"))
    allowed = rules_.task().allowed.tolist()
    assert allowed == [[True, False, False], [True, True, False]] + [[False, False, True]] * 2


def test_edge_layers_need_names_with_layers() -> None:
    problem = problem_of(LOSSES)
    odd = problem.linears[0].model_copy(update={"name": "strange"})
    problem = problem.model_copy(update={"linears": (odd, *problem.linears[1:])})
    with pytest.raises(UsageError, match="strange"):
        rules_of(problem, first_layers=(1, "fp8"))


def test_an_unreachable_target_names_the_pin_in_its_way_and_the_best_target() -> None:
    pins = (("*.layers.0.*", "fp8"), ("*.layers.1.*", "fp4"))
    error = conflict(rules_of(problem_of(LOSSES, target=0.9), pins=pins))
    assert error.conflicts == ("target 0.9", "pin *.layers.0.*=fp8")
    assert error.best_target == 0.75
    assert "best reachable target is 0.75" in str(error)


def test_an_unreachable_target_names_the_limit_on_changes() -> None:
    error = conflict(rules_of(problem_of(LOSSES, target=0.9), ["fp8"] * 4, max_changes=2))
    assert error.conflicts == ("target 0.9", "max-changes 2")
    assert error.best_target == 0.5


def test_only_the_stages_in_the_way_are_named() -> None:
    problem = problem_of([[0.0, 1.0], [0.0, 1.0], [0.0, None]], target=0.5, stages=[0, 1, 1])
    error = conflict(rules_of(problem, pipeline_balance="stage", pins=(("*.layers.1.*", "fp8"),)))
    assert error.conflicts == ("target 0.5 in stage 1", "pin *.layers.1.*=fp8", FORBIDDEN)
    assert error.best_target == 0.0


def test_linears_without_any_option_left_are_named() -> None:
    error = conflict(rules_of(problem_of([[0.0, 1.0], [None, None]], target=0.0)))
    assert error.conflicts == (FORBIDDEN,)
    assert name_of(1) in str(error)
    assert error.best_target is None


def test_a_pin_to_a_forbidden_option_conflicts_with_its_being_forbidden() -> None:
    problem = problem_of([[0.0, None], [0.0, 1.0]], target=0.0)
    error = conflict(rules_of(problem, pins=(("*.layers.0.*", "fp4"),)))
    assert error.conflicts == ("pin *.layers.0.*=fp4", FORBIDDEN)


@pytest.mark.parametrize("balance", ["none", "stage"])
def test_reported_conflicts_are_infeasible_and_each_of_them_is_needed(balance: str) -> None:
    infeasible = [
        given for seed in SEEDS if most_gain((given := rules(seed, balance)).task()) is None
    ]
    assert len(infeasible) > 10
    for given in infeasible:
        error = conflict(given)
        assert most_gain(given.task(error.conflicts)) is None
        for label in error.conflicts:
            rest = [other for other in error.conflicts if other != label]
            assert most_gain(given.task(rest)) is not None, label


def test_the_best_target_that_is_reported_can_be_reached() -> None:
    problem = problem_of(LOSSES, target=0.9, flops=[1.0, 3.0, 3.0, 0.7])
    error = conflict(rules_of(problem, pins=(("*.layers.1.*", "fp8"),)))
    assert error.best_target == pytest.approx(4.7 / 7.7)
    said = float(str(error).rsplit(" ", 1)[1])
    for target in (error.best_target, said):
        rules_of(problem, target=target, pins=(("*.layers.1.*", "fp8"),)).checked_task()

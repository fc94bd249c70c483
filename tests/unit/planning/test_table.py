import math

import numpy as np
import pytest

from megatron_snip.errors import UsageError
from megatron_snip.planning import scaling
from megatron_snip.planning.cost import COST_MODELS
from megatron_snip.planning.problem import LinearChoices, OptionCost, PlanningProblem
from megatron_snip.planning.table import canonical, make_table
from tests.unit.planning.build import problem_of

FLOPS = COST_MODELS["flops"]


def test_options_have_one_spelling() -> None:
    assert canonical("fp4-fp4-fp4") == "fp4"
    assert canonical("fp4-fp8-bf16") == "fp4-fp8-bf16"
    assert canonical("int2") == "int2"  # names that are no options pass through


def ragged() -> PlanningProblem:
    """Two linears with different options, in stages 0 and 2."""
    first = {
        "fp8": OptionCost(quality_loss=0.5, saving=0.0),
        "fp4": OptionCost(quality_loss=None, saving=1.0),
        "fp4-fp8-fp8": OptionCost(quality_loss=1.0, saving=1 / 3),
    }
    second = {"fp4": OptionCost(quality_loss=2.0, saving=1.0)}
    return PlanningProblem(
        linears=(
            LinearChoices(name="a", stage=0, flops=3.0, options=first),
            LinearChoices(name="b", stage=2, flops=1.0, options=second),
        ),
        target=0.5,
    )


def test_rows_are_padded_and_forbidden_options_are_not_offered() -> None:
    table = make_table(ragged(), FLOPS)
    assert table.listed.tolist() == [[True, True, True], [True, False, False]]
    assert table.offered.tolist() == [[True, False, True], [True, False, False]]
    assert [len(rows) for rows in table.members] == [1, 0, 1]
    assert table.columns_of(["fp4-fp8-fp8", "fp8"]).tolist() == [2, -1]


def test_efficiencies_and_losses_of_an_assignment() -> None:
    table = make_table(ragged(), FLOPS)
    columns = np.array([2, 0])
    assert table.efficiency(columns) == 0.5  # (3 / 3 + 1) / 4, exactly
    assert table.stage_efficiencies(columns) == (1 / 3, 1.0, 1.0)  # stage 1 has no work
    assert table.quality_loss(columns) == 3.0
    assert math.isnan(table.quality_loss([1, 0]))


def test_unlisted_bf16_costs_nothing_and_is_not_offered() -> None:
    table = make_table(ragged(), FLOPS, with_bf16=True)
    assert table.options[0][-1] == table.options[1][-1] == "bf16"
    assert not table.offered[0, 3]
    assert not table.offered[1, 1]
    assert table.quality_loss([3, 1]) == 0.0
    assert table.efficiency([3, 1]) == 0.0


def test_unlisted_bf16_has_no_seconds() -> None:
    problem = problem_of([[0.0, 1.0]], seconds=[[2.0, 1.0]])
    with pytest.raises(UsageError, match="bf16"):
        make_table(problem, COST_MODELS["time"], with_bf16=True)


def test_integer_gains_follow_the_exact_ones() -> None:
    table = make_table(ragged(), FLOPS)
    assert table.overall_row.coefficients.tolist() == [[0, 3, 1], [1, 0, 0]]
    assert table.stage_row.coefficients.tolist() == [[0, 3, 1], [1, 0, 0]]
    assert [scale.exact for scale in table.stage_row.scales] == [True, True, True]


def test_the_efficiency_error_is_zero_where_gains_share_a_unit_and_stated_elsewhere() -> None:
    assert make_table(ragged(), FLOPS).efficiency_error == 0.0
    odd = problem_of([[0.0, 1.0]] * 3, flops=[math.pi, math.e, 1e-9 * math.sqrt(2)])
    assert 0.0 < make_table(odd, FLOPS).efficiency_error <= 3 * 2.0**-46


def test_more_linears_than_integers_can_tell_apart_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scaling, "MAX_SUM", 2**20)
    odd = problem_of([[0.0, 1.0]] * 3, flops=[math.pi, math.e, math.sqrt(2)])
    with pytest.raises(UsageError, match="share no unit"):
        _ = make_table(odd, FLOPS).overall_row

"""Names and values of scalars: what stands, what belongs to a step, what is left out."""

import math

import pytest

from megatron_snip.reporting.reporter import Applied, Event
from megatron_snip.reporting.scalars import StepScalars, training_scalars
from tests.unit.reporting.runs import Shape, config, plan_from, refresh_at

SHAPE = Shape(config())


def test_every_wanted_number_has_a_name_of_room_and_quantity() -> None:
    scalars = StepScalars()
    refresh = refresh_at(SHAPE, 2)
    plan = plan_from(SHAPE, refresh)
    scalars.refreshed(refresh)
    scalars.planned(Applied(plan, 4, num_changed=5, waited_s=0.25))
    scalars.event(Event(4, "kept", "why"))
    row = scalars.take({"loss": 3.0, "lowest_precision_fraction": 0.75})
    assert all(name.split("/")[0] == "snip" and name.count("/") == 2 for name in row)
    lowest = [list(linear.options.values())[-1] for linear in refresh.divergences.linears]
    assert row["snip/divergence/loss_total"] == sum(d.loss_divergence for d in lowest)
    assert row["snip/divergence/weight_total"] == sum(d.weight_divergence for d in lowest)
    assert row["snip/planning/objective"] == plan.objective
    assert row["snip/planning/efficiency"] == plan.efficiency
    assert row["snip/planning/solve_s"] == 0.125
    assert row["snip/planning/wait_s"] == 0.25
    assert row["snip/planning/changed_linears"] == 5
    assert row["snip/statistics/refresh_s"] == 0.25
    assert row["snip/statistics/loss"] == 4.0
    assert row["snip/statistics/num_linears"] == 12
    assert row["snip/controller/num_kept_plans"] == 1
    assert row["snip/controller/num_guard_events"] == row["snip/controller/num_fallbacks"] == 0
    assert row["snip/linears/lowest_precision_fraction"] == 0.75
    assert row["snip/training/loss"] == 3.0


def test_a_plan_is_judged_by_the_last_measurement() -> None:
    scalars = StepScalars()
    refresh = refresh_at(SHAPE, 2)
    plan = plan_from(SHAPE, refresh)
    scalars.refreshed(refresh)
    scalars.planned(Applied(plan, 4, 1, 0.0))
    chosen = [row.options[plan.linears[row.name]] for row in refresh.divergences.linears]
    row = scalars.take({})
    assert row["snip/divergence/plan_loss_total"] == sum(d.loss_divergence for d in chosen)
    assert 0 < row["snip/divergence/plan_loss_total"] < row["snip/divergence/loss_total"]


def test_what_stands_is_repeated_and_what_was_of_a_step_is_zero_again() -> None:
    scalars = StepScalars()
    scalars.refreshed(refresh_at(SHAPE, 2))
    first, second = scalars.take({}), scalars.take({})
    assert second["snip/divergence/loss_total"] == first["snip/divergence/loss_total"]
    assert first["snip/statistics/refresh_s"] == 0.25
    assert second["snip/statistics/refresh_s"] == 0.0


def test_a_plan_that_does_not_know_its_objective_does_not_show_the_former_ones() -> None:
    scalars = StepScalars()
    plan = plan_from(SHAPE, refresh_at(SHAPE, 2))
    scalars.planned(Applied(plan, 4, 1, 0.0))
    assert "snip/planning/objective" in scalars.take({})
    blind = plan.model_copy(update={"objective": None, "bound": None})
    scalars.planned(Applied(blind, 12, 1, 0.0))
    assert "snip/planning/objective" not in scalars.take({})


@pytest.mark.parametrize("value", [None, math.nan, math.inf, "text"])
def test_what_is_unknown_is_left_out(value: object) -> None:
    assert training_scalars({"loss": value, "lr": 0.5}) == {"snip/training/lr": 0.5}

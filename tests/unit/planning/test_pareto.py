import numpy as np
import pytest

from megatron_snip.planning.pareto import frontier
from megatron_snip.planning.planner import make_plan
from megatron_snip.planning.settings import PlanSettings
from tests.unit.planning.build import problem_of

RANDOM = np.random.default_rng(0)
LOSSES = [[0.0, *sorted(map(float, RANDOM.random(2)))] for _ in range(20)]
PROBLEM = problem_of(LOSSES, 0.5, ("fp8", "fp4-fp8-fp8", "fp4"), stages=[i // 5 for i in range(20)])


@pytest.mark.parametrize("balance", ["none", "stage"])
def test_every_point_is_what_planning_for_its_target_gives(balance: str) -> None:
    settings = PlanSettings(pipeline_balance=balance)
    points = frontier(PROBLEM, settings, [0.9, 0.1, 0.5, 0.5])
    assert [point.target for point in points] == [0.1, 0.5, 0.9]
    for point in points:
        plan = make_plan(PROBLEM, settings.model_copy(update={"target": point.target}))
        assert point.plan.objective == pytest.approx(plan.objective)
        assert (point.plan.status, point.plan.gap) == ("optimal", pytest.approx(0.0, abs=1e-9))
        assert point.plan.efficiency >= point.target

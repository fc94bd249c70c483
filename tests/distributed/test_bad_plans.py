"""Plans that break the loss go, and training is as if they had not been, or recovers."""

from typing import Any

import pytest

from tests.distributed.layouts import names, results_on
from tests.distributed.test_faults import LAYOUTS
from tests.distributed.workers.bad_plans import START

bad_plans = results_on(2, "tests.distributed.workers.bad_plans:bad_plans", LAYOUTS)


@pytest.mark.parametrize("name", names(["tp", "dp"], []))
@pytest.mark.parametrize("how", ["gradient", "loss", "useless"])
def test_a_plan_that_breaks_a_step_leaves_no_trace(
    bad_plans: list[dict[str, Any]], name: str, how: str
) -> None:
    for rank, runs in enumerate(r[name] for r in bad_plans):
        run, plain = runs[how], runs["plain"]
        assert {key: run[key] for key in plain} == plain
        # Applied before this iteration, reverted within it; the digest is that of BF16 throughout.
        step = START + 2
        assert [at for at, _ in run["history"]] == [step, step]
        assert run["history"][1][1] == run["digest"] != run["history"][0][1]
        assert run["bf16"] == ["bf16"]
        assert run["events"] == [[step, "guard"], [step, "reverted"]]
        assert run["planned"] == [[step, START + 1, 8], [step, step, 8]]
        assert len(run["warnings"]) == (2 if rank == 0 else 0)

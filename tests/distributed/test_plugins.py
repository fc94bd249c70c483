"""A mistake in a plugin does not end training: one line, and the rest goes on."""

from typing import Any, NoReturn

import pytest

from megatron_snip.divergence.quality_loss import LOSS_DIVERGENCES
from megatron_snip.planning.policies import POLICIES, Policy
from megatron_snip.statistics.added import STATISTICS, Statistic
from megatron_snip.types import Operand
from tests.distributed.launch import run_ranks
from tests.distributed.layouts import TP2
from tests.distributed.small_model import NARROW, layout

SNIP = {"interval": 100, "start_step": 4, "lag": 1, "efficiency_target": 0.6}
BROKEN: dict[str, dict[str, Any]] = {
    "nothing": {},
    "statistic": {},
    "divergence": {"loss_divergence": "broken"},
    "policy": {"policy": "broken"},
}
LINES = {
    "statistic": "statistic 'broken' is left out where its plugin failed to measure it: ",
    "divergence": "loss_divergence 'broken' of a plugin failed: ",
    "policy": "no plan for the problem of iteration 4: ",
}


def broken(*_: Any) -> NoReturn:
    raise ZeroDivisionError("a mistake")


def trainings() -> dict[str, Any]:
    """On ranks: train under each broken plugin."""
    LOSS_DIVERGENCES["broken"] = broken
    POLICIES["broken"] = Policy("broken", broken, needs_statistics=True)
    return {kind: _train(kind) for kind in BROKEN}


def _train(kind: str) -> dict[str, Any]:
    STATISTICS.clear()
    if kind == "statistic":
        STATISTICS["broken"] = Statistic(Operand.INPUT, broken)
    with layout({"num_layers": 2, **NARROW, **TP2}) as trainer:
        controller = trainer.run(7, {**SNIP, **BROKEN[kind]})
        return {
            "losses": trainer.losses,
            "plans": [iteration for iteration, _ in trainer.events.applied],
            "lines": [*trainer.warnings, *trainer.tracebacks],
            "plan": [str(option) for option in controller.plan.linears.values()],
        }


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(2, "tests.distributed.test_plugins:trainings")


@pytest.mark.parametrize("kind", LINES)
def test_training_goes_on_under_a_broken_plugin(results: list[dict[str, Any]], kind: str) -> None:
    first, second = (result[kind] for result in results)
    wanted = results[0]["nothing"]
    assert wanted["plans"][-1] == 5
    for key in ("losses", "plans", "plan"):
        assert first[key] == second[key]
    assert len(first["losses"]) == 7 and first["losses"][:4] == wanted["losses"][:4]
    if kind == "statistic":  # the others make the plan
        assert [first[key] for key in ("losses", "plans")] == [wanted["losses"], wanted["plans"]]
    else:
        assert first["plans"] == wanted["plans"][:-1] and first["plan"] != wanted["plan"]
    found = [line for line in first["lines"] if LINES[kind] in line]
    assert found
    if kind != "policy":  # the solver's process, which imports plugins, does not know it
        assert "ZeroDivisionError: a mistake" in found[0]
    assert len(set(found)) == 1

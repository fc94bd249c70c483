"""Linears that are not measured: a frozen stage, and a refresh that fails on one rank."""

from typing import Any
from unittest import mock

from megatron.core import parallel_state

from megatron_snip.statistics import observer
from megatron_snip.trainer import model as trainer_model
from tests.distributed.launch import run_ranks
from tests.distributed.layouts import PP2, TP2
from tests.distributed.small_model import NARROW, SolverHere, layout

SNIP: dict[str, Any] = {
    "interval": 4,
    "start_step": 2,
    "lag": 1,
    "efficiency_target": 0.5,
    "formats": "fp8,fp4",
}
"""Refreshes at iterations 2 and 6."""


def on_ranks(name: str, **arguments: Any) -> list[Any]:
    """What a function of this module returned on each of two ranks."""
    return run_ranks(2, f"tests.distributed.test_unmeasured:{name}", arguments)


def train_with_frozen_stage() -> dict[str, Any]:
    """On ranks: a run whose first pipeline stage is frozen: its optimizer has nothing to step."""
    initialize = trainer_model.initialize_weights

    def initialize_and_freeze(chunk: Any, config: Any) -> None:
        initialize(chunk, config)
        chunk.requires_grad_(not parallel_state.is_pipeline_first_stage())

    values = {**NARROW, **PP2, "num_layers": 2}
    with (
        mock.patch.object(trainer_model, "initialize_weights", initialize_and_freeze),
        layout(values) as trainer,
    ):
        controller = trainer.run(9, SNIP)
        return {
            "refreshes": [iteration for iteration, _ in trainer.events.measured],
            "options": {name: str(o) for name, o in controller.plan.linears.items()},
            "warnings": trainer.warnings,
        }


def test_a_frozen_pipeline_stage_stops_no_plan() -> None:
    """No backward reaches its linears: they run as in the job. The others are planned."""
    first, second = on_ranks("train_with_frozen_stage")
    assert first["refreshes"] == second["refreshes"] == [2, 6]
    assert first["options"] == second["options"]
    by_layer = {0: set(), 1: set()}
    for name, option in first["options"].items():
        by_layer[int(name.split(".")[2])].add(option)
    assert by_layer == {0: {"bf16"}, 1: {"fp4"}}
    assert any("no backward reached 4 of 8 linears" in text for text in first["warnings"])


def train_with_failing_refresh() -> dict[str, Any]:
    """On ranks: measuring fails in iteration 2, on one rank."""
    measure_linear = observer.operand_sums
    with layout({**NARROW, **TP2}) as trainer:

        def fail_once(*args: Any, **kwargs: Any) -> Any:
            if trainer.step == 1 and parallel_state.get_tensor_model_parallel_rank() == 1:
                raise MemoryError("no memory left")
            return measure_linear(*args, **kwargs)

        means = []
        controller = trainer.controller(SNIP, SolverHere())
        with mock.patch.object(observer, "operand_sums", fail_once):
            for _ in range(9):
                trainer.advance(1, controller)
                mean = controller.state(trainer.step).observations
                means.append(None if mean is None else len(mean.linears))
        controller.close()
        return {
            "means": means,
            "refreshes": [iteration for iteration, _ in trainer.events.measured],
            "unmeasured": [w for w in trainer.warnings if "no backward reached" in w],
            "efficiency": controller.plan.efficiency,
        }


def test_a_refresh_that_fails_on_one_rank_leaves_no_half_measurement() -> None:
    """A plan for another target would come from it, and a resumed run's first plan."""
    for found in on_ranks("train_with_failing_refresh"):
        assert found["efficiency"] >= 0.5  # the second refresh makes a plan
        assert found["refreshes"] == [6]
        assert found["means"][:5] == [None] * 5
        assert None not in found["means"][5:]
        assert found["unmeasured"] == []

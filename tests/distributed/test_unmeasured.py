"""Linears that are not measured: a frozen stage, a part that fails, a stop within a refresh."""

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
"""Refreshes begin at iterations 2 and 6."""
IN_PARTS = {**SNIP, "measure_fraction": 0.5}
"""They measure in iterations 2 and 3, and 6 and 7."""


def on_ranks(name: str) -> list[Any]:
    """What a function of this module returned on each of two ranks."""
    return run_ranks(2, f"tests.distributed.test_unmeasured:{name}", {})


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


def train_with_failing_part() -> dict[str, Any]:
    """On ranks: measuring fails in iteration 2, on one rank, in the first part of a refresh."""
    measure = observer.partial_sums
    with layout({**NARROW, **TP2}) as trainer:

        def fail_once(*args: Any, **kwargs: Any) -> Any:
            if trainer.step == 1 and parallel_state.get_tensor_model_parallel_rank() == 1:
                raise MemoryError("no memory left")
            return measure(*args, **kwargs)

        means = []
        controller = trainer.controller(IN_PARTS, SolverHere())
        with mock.patch.object(observer, "partial_sums", fail_once):
            for _ in range(9):
                trainer.advance(1, controller)
                mean = controller.state(trainer.step).observations
                means.append(None if mean is None else len(mean.linears))
        controller.close()
        return {
            "means": means,
            "refreshes": [iteration for iteration, _ in trainer.events.measured],
            "unmeasured": [w for w in trainer.warnings if "no backward reached" in w],
        }


def test_a_refresh_whose_part_fails_leaves_no_half_measurement() -> None:
    """A plan for another target would come from it, and a resumed run's first plan."""
    for found in on_ranks("train_with_failing_part"):
        assert found["refreshes"] == [7]
        assert found["means"][:6] == [None] * 6
        assert None not in found["means"][6:]
        assert found["unmeasured"] == []


def train_in_two_parts() -> dict[str, Any]:
    """On ranks: a run that is stopped between the parts of its first refresh, and resumed."""
    with layout({**NARROW, **TP2}) as trainer:
        controller = trainer.controller(IN_PARTS, SolverHere())
        trainer.advance(2, controller)
        state = controller.state(2)
        controller.close()
        controller = trainer.controller(IN_PARTS, SolverHere(), state)
        trainer.advance(7, controller)
        controller.close()
        measured = [(iteration, len(m.health.linears)) for iteration, m in trainer.events.measured]
        return {"kept": state.observations is not None, "measured": measured}


def test_a_run_that_stops_within_a_refresh_measures_all_of_it_again() -> None:
    first, second = on_ranks("train_in_two_parts")
    assert first == second
    assert not first["kept"]
    (refresh, num_linears), (_, again) = first["measured"]
    assert refresh == 4  # iterations 3 and 4
    assert num_linears == again == 8

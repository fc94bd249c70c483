"""How often all ranks exchange something, by what an iteration does; and in what time it grows."""

import math
from typing import Any

import pytest

from benchmarks.scale import MODELS, rank_of
from tests.distributed.launch import run_ranks
from tests.distributed.layouts import EP2, PP2, names
from tests.distributed.small_model import NARROW, layout

SNIP: dict[str, Any] = {"interval": 100, "start_step": 3, "lag": 2, "efficiency_target": 0.5}
EXPERTS: dict[str, Any] = {"num_experts": 4, **EP2}
ITERATIONS = {"ordinary": 2, "measured": 3, "applied": 5, "watched": 6}
"""Under SNIP above."""
# A job of Megatron makes two more at its start: for settings, and for its files. An iteration has
# one for the loss; one that is measured or watched makes it together with others.
MOST = {"start": 4, "ordinary": 1, "measured": 2, "applied": 3, "watched": 1}
MOST_WITH_EXPERTS = {**MOST, "measured": 3}


@pytest.mark.parametrize(
    ("model", "limits"), [(PP2, MOST), (EXPERTS, MOST_WITH_EXPERTS)], ids=["stages", "experts"]
)
def test_an_iteration_makes_few_exchanges(model: dict[str, Any], limits: dict[str, int]) -> None:
    for found in run_ranks(2, "tests.distributed.test_scale:exchanges", {"values": model}):
        assert found["kinds"] == {"measured": 1, "applied": 1}
        for name, most in limits.items():
            assert found["exchanges"][name] <= most, name


def exchanges(values: dict[str, Any]) -> dict[str, Any]:
    """On ranks: exchanges of the start, and of iterations that are ordinary, measured, ..."""
    with layout({**NARROW, **values}) as trainer:
        controller = trainer.controller(SNIP)
        control = controller.model.runtime.topology.control
        found = {"start": control.traffic.exchanges}
        of_iteration = {}
        for iteration in range(1, max(ITERATIONS.values()) + 1):
            before = control.traffic.exchanges
            trainer.advance(1, controller)
            of_iteration[iteration] = control.traffic.exchanges - before
        controller.close()
        found |= {name: of_iteration[iteration] for name, iteration in ITERATIONS.items()}
        kinds = {"measured": len(trainer.events.measured), "applied": len(trainer.events.applied)}
        return {"exchanges": found, "kinds": kinds}


@pytest.mark.parametrize("model", names(MODELS, ["Llama-405B TP8 PP16"]))
def test_what_a_rank_sends_and_holds_does_not_grow_with_the_ranks(model: str) -> None:
    """The records of published models at 8 and 32 ranks."""
    by_size = {
        size: run_ranks(size, "tests.distributed.test_scale:phases", {"model": model})
        for size in (8, 32)
    }
    for size, ranks in by_size.items():
        for found in ranks:
            for name, phase in found.items():
                if name == "start":  # what docs/at-scale.md says
                    assert phase["exchanges"] == 6
                if name != "group":
                    assert phase["messages"] <= 6 * math.log2(size) * phase["exchanges"], name
    few, many = (
        max(rank["start"]["bytes"] for rank in ranks) / math.log2(size)
        for size, ranks in by_size.items()
    )
    assert many <= 2.5 * few  # as many stages as ranks, at most 16


def phases(model: str) -> dict[str, Any]:
    """On ranks: what each phase exchanged."""
    return rank_of(model, repetitions=1)

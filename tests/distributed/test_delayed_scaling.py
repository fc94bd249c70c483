"""Simulated delayed scaling on two ranks: shared histories, recomputed forwards, a resume.

The history is 5 long, and an iteration has two microbatches, or four in the pipeline.
"""

import base64
import json
from contextlib import nullcontext
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist
from megatron.core.utils import get_model_config

from megatron_snip.errors import SnipError
from megatron_snip.run.state import ControllerState
from tests.distributed.launch import run_ranks
from tests.distributed.layouts import EP2, PP2, RECOMPUTE, SP, TP2, names, results_on
from tests.distributed.small_model import NARROW, layout

LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor and sequence": {**TP2, **SP},
    "data": {},
    "pipeline": {**PP2, "global_batch_size": 4},
    "pipeline, recomputed": {**PP2, **RECOMPUTE, "global_batch_size": 4},
    "experts": {**EP2, "num_experts": 4},
}
STOPPED_AT, END = 3, 6
DELAYED = {"policy": "uniform-fp8_delayed_hybrid", "formats": "bf16,fp8_delayed_hybrid"}


def train(values: dict[str, Any]) -> dict[str, Any]:
    """On ranks: train without and with a stop, from which a new controller resumes."""

    def run(*ends: int) -> tuple[list[float], dict[str, str], dict[str, str]]:
        with layout({**NARROW, **values, "micro_batch_size": 1, "train_iters": END}) as trainer:
            for chunk in trainer.state.model:
                config = get_model_config(chunk)
                config.fp8_amax_history_len = 5
                config.fp8_amax_compute_algo = "max"
            state = None
            for end in ends:
                controller = trainer.controller(DELAYED, state=state)
                trainer.advance(end - trainer.step, controller)
                own = controller.state(end, of_all_ranks=False).delayed_scaling
                saved = json.loads(json.dumps(controller.state(end).to_dict()))
                controller.close()
                state = ControllerState.from_dict(saved)
            return trainer.losses, dict(own), saved["delayed_scaling"]

    losses, own, of_all = run(END)
    resumed = run(STOPPED_AT, END)
    return {
        "losses": losses,
        "own": own,
        "all": of_all,
        "resumed": resumed == (losses, own, of_all),
    }


def fail_to_save() -> str:
    """On ranks: the last rank fails while its histories are saved; return what each rank raises."""
    with layout({**NARROW, **TP2, "micro_batch_size": 1, "train_iters": END}) as trainer:
        controller = trainer.controller(DELAYED)
        trainer.advance(1, controller)
        scaling = controller.model.runtime.delayed
        broken = mock.patch.object(scaling, "state_dict", side_effect=MemoryError("no memory"))
        with broken if dist.get_rank() == 1 else nullcontext(), pytest.raises(SnipError) as raised:
            controller.state(1)
        again = controller.state(1)
        controller.close()
    assert len(again.delayed_scaling) == 2 * 4
    return str(raised.value)


on_two = results_on(2, "tests.distributed.test_delayed_scaling:train", LAYOUTS)


def amaxes(state: dict[str, str]) -> dict[str, np.ndarray[Any, Any]]:
    """What scales are made of, and the history, [6, 3], by linear."""
    return {
        name: np.frombuffer(base64.b64decode(text), "<f4").reshape(-1, 3)
        for name, text in state.items()
    }


@pytest.mark.parametrize("name", names(LAYOUTS, fast=["tensor and sequence", "pipeline"]))
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(on_two: Any, name: str) -> None:
    first, second = on_two(name)
    assert first["resumed"] and second["resumed"]
    assert first["all"] == second["all"]
    num_linears = 2 * (2 + 2 * 4) if name == "experts" else 2 * 4
    assert len(first["all"]) == num_linears


@pytest.mark.parametrize("name", names(["tensor and sequence", "data"], ["tensor and sequence"]))
def test_ranks_share_the_largest_magnitudes(on_two: Any, name: str) -> None:
    first, second = on_two(name)
    assert first["own"] == second["own"] == first["all"]
    if name == "data":  # half as many microbatches as on one rank
        return
    (alone,) = run_ranks(1, "tests.distributed.test_delayed_scaling:train", {"values": {}})
    assert alone["all"].keys() == first["all"].keys()
    for linear, wanted in amaxes(alone["all"]).items():
        np.testing.assert_allclose(amaxes(first["all"])[linear], wanted, rtol=0.2)


def test_a_recomputed_forward_has_the_scales_of_the_first(on_two: Any) -> None:
    """In the pipeline other microbatches run between the two."""
    for rank in range(2):
        assert on_two("pipeline, recomputed")[rank] == on_two("pipeline")[rank]


def test_all_ranks_learn_that_one_cannot_save_its_histories() -> None:
    first, second = run_ranks(2, "tests.distributed.test_delayed_scaling:fail_to_save", {})
    assert first == second
    assert "rank 1" in first and "no memory" in first

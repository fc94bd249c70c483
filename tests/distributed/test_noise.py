"""A run whose gradient falls below the noise of its plan: it heals, and resumes healing."""

import json
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_snip.run.state import RunState
from tests.distributed.launch import run_ranks
from tests.distributed.small_model import NARROW, SolverHere, Trainer, layout

SNIP: dict[str, Any] = {
    "interval": 10,
    "start_step": 2,
    "lag": 1,
    "formats": "bf16,fp3",
    "efficiency_target": 1.0,
    "heal_below_noise": 1.0,
}
"""Refreshes at iterations 2, 12 and 22."""
NUM_ITERATIONS = 60


class Coins:
    """Tosses of a coin, the same ones in each iteration.

    What can be learned is learned in a few iterations. From then on the gradients of the tokens
    cancel: that of the batch is near 0, and the errors of the tokens are as large as ever.
    """

    def __init__(self, batch_size: int, length: int) -> None:
        self._batch_size = batch_size
        self._length = length

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index % self._batch_size + 1)
        tokens = torch.randint(0, 2, (self._length + 1,), generator=generator)
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": torch.ones(self._length),
            "position_ids": torch.arange(self._length),
        }


def train(parts: list[int]) -> dict[str, Any]:
    """On ranks: train for so many iterations in each part, which resumes from the one before."""
    model = {**NARROW, "seq_length": 64, "global_batch_size": 8, "micro_batch_size": 8}
    samples = property(lambda self: Coins(8, self.config.seq_length))
    state = None
    found: dict[str, Any] = {"noise": {}, "watched": {}, "notices": [], "targets": {}}
    with (
        layout({**model, "train_iters": NUM_ITERATIONS}) as trainer,
        mock.patch.object(Trainer, "samples", samples),
    ):
        for steps in parts:
            controller = trainer.controller(SNIP, SolverHere(), state)
            trainer.advance(steps, controller)
            saved = json.loads(json.dumps(controller.state(trainer.step).to_dict()))
            state = RunState.from_dict(saved)
            controller.close()
            events = trainer.events
            found["noise"] |= {str(i): m.gradient_noise for i, m in events.measured}
            found["watched"] |= {str(i): m.watched for i, m in events.measured}
            found["notices"] += [(i, n.kind, n.message) for i, n in events.notices]
            found["targets"] |= {str(i): a.plan.target for i, a in events.applied if not a.resumed}
        return {**found, **trainer.digests(), "heal_from": state and state.heal_from}


@pytest.fixture(scope="module")
def uninterrupted() -> dict[str, Any]:
    (run,) = run_ranks(1, "tests.distributed.test_noise:train", {"parts": [35]})
    return run


def test_a_run_heals_from_the_refresh_on_whose_gradient_is_below_the_noise(
    uninterrupted: dict[str, Any],
) -> None:
    noise = uninterrupted["noise"]
    assert noise["2"] == 0.0  # in BF16
    assert noise["12"] < 1.0 < noise["22"]
    assert uninterrupted["heal_from"] == 22
    ((at, kind, text),) = uninterrupted["notices"]
    assert (at, kind) == (22, "health")
    assert text.startswith(f"gradient noise {noise['22']:.3g} under the snip plan of iteration 12")
    assert text.endswith("is above 1: healing begins")
    targets = {int(i): target for i, target in uninterrupted["targets"].items()}
    assert [targets[i] for i in (3, 13, 23)] == [1.0] * 3
    after = [target for i, target in targets.items() if i > 23]
    assert len(after) >= 5 and after == sorted(after, reverse=True)
    assert after[-1] <= 1.0 - (34 - 22) / (57 - 22) + 0.05  # the ramp reaches 0 at iteration 57


def test_a_resumed_run_goes_on_healing(uninterrupted: dict[str, Any]) -> None:
    (resumed,) = run_ranks(1, "tests.distributed.test_noise:train", {"parts": [24, 11]})
    for key in ("losses", "weights", "optimizer", "targets", "heal_from", "notices", "watched"):
        assert resumed[key] == uninterrupted[key], key


def test_series_of_linears_keep_their_names(uninterrupted: dict[str, Any]) -> None:
    first, *others = uninterrupted["watched"].values()
    assert len(set(first)) == 8  # every linear: there are fewer than ten
    assert others == [first] * 3  # also after the resume, above


def norms() -> list[tuple[float, float, float]]:
    """On ranks: |dL/dW| of each linear from the optimizer's gradient; |X| |G|; sampled tokens."""
    with layout({**NARROW, "micro_batch_size": 2}) as trainer:
        trainer.run(2, {"start_step": 2, "collect_only": True})
        ((_, refresh),) = trainer.events.measured
        table = refresh.divergences.statistics.linears
        pairs = zip(refresh.health.linears, table, strict=True)
        return [
            (h.gradient_norm or 0.0, (s.input_square * s.grad_square) ** 0.5, s.tokens)
            for h, s in pairs
        ]


def test_noise_and_gradient_have_one_unit() -> None:
    """A batch of one microbatch that is so short that all its tokens are measured.

    Then dW = G^T X has at most |X| |G|, and |X| |G| / sqrt(tokens) if its tokens were independent:
    what the estimate of noise assumes. Tokens that agree add up to more.
    """
    (found,) = run_ranks(1, "tests.distributed.test_noise:norms", {})
    for gradient, bound, tokens in found:
        assert bound / tokens**0.5 < 2 * gradient < 2 * bound, (gradient, bound, tokens)

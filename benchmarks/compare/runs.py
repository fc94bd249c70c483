"""Runs that branch from one checkpoint in this process.

A warm model is trained in BF16 and its weights and optimizer state are copied. Each branch starts
from the copy, trains under one plan on the same samples, and is evaluated on the same held-out
text. So two branches differ in their plan alone. The learning rate is constant before a branch and
falls linearly to zero in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from megatron.core.utils import unwrap_model

from benchmarks.compare.variants import Plan
from benchmarks.lab import Lab, open_lab
from megatron_snip.config import SnipConfig
from megatron_snip.quantizers.stochastic import StochasticStream, StreamKey
from megatron_snip.statistics.records import StatisticsTable


@dataclass(frozen=True)
class Setup:
    """A model and how long it trains.

    Attributes:
        model: settings of the trainer over `benchmarks.lab.BASE`.
        warm: iterations in BF16 before the branches.
        length: iterations of a branch.
        held_out: microbatches of held-out text.
        measured: microbatches that the plans are made from.
    """

    model: dict[str, Any]
    warm: int
    length: int
    held_out: int = 48
    measured: int = 4


SETUPS = {
    "small": Setup({"num_layers": 6, "ffn_hidden_size": 384, "lr": 1e-3, "min_lr": 1e-3}, 200, 100),
    "quick": Setup(
        {"num_layers": 3, "hidden_size": 64, "ffn_hidden_size": 128, "lr": 1e-3, "min_lr": 1e-3},
        40,
        30,
        8,
        2,
    ),
    "deep": Setup({"num_layers": 8, "ffn_hidden_size": 384, "lr": 1e-3, "min_lr": 1e-3}, 200, 100),
    "experts": Setup(  # two of four experts for each token
        {
            "num_layers": 6,
            "ffn_hidden_size": 256,
            "num_experts": 4,
            "moe_ffn_hidden_size": 256,
            "lr": 1e-3,
            "min_lr": 1e-3,
        },
        200,
        100,
    ),
    "gqa": Setup(  # four heads share keys and values, and the output layer is ten times wider
        {
            "num_layers": 6,
            "ffn_hidden_size": 384,
            "num_query_groups": 1,
            "make_vocab_size_divisible_by": 4096,
            "lr": 1e-3,
            "min_lr": 1e-3,
        },
        200,
        100,
    ),
    "large": Setup(
        {
            "num_layers": 8,
            "hidden_size": 512,
            "ffn_hidden_size": 1408,
            "num_attention_heads": 8,
            "num_query_groups": 8,
            "lr": 6e-4,
            "min_lr": 6e-4,
        },
        300,
        200,
    ),
}


@contextmanager
def warm_model(setup: Setup, seed: int, scenario: str) -> Iterator[WarmModel]:
    """Train a model of this seed in BF16; branches start from it.

    Args:
        setup: the model.
        seed: of its initial weights and data.
        scenario: of `SCENARIOS`; it changes the warm model.
    """
    values = {"seed": 1234 + seed, "train_iters": setup.warm + setup.length}
    values |= {"lr_decay_style": "constant"}
    with open_lab({**setup.model, **values}) as lab, _remembering_draws(lab):
        lab.train(setup.warm)
        SCENARIOS[scenario](lab)
        yield WarmModel(setup, lab)


class WarmModel:
    """A trained model that branches start from."""

    def __init__(self, setup: Setup, lab: Lab) -> None:
        self._setup = setup
        self._lab = lab
        self._rate = float(lab.config.lr)
        self._copy = _Copy.of(lab)

    @property
    def digest(self) -> str:
        """Names weights and optimizer state: branches of equal digests can be compared."""
        return self._copy.digest()

    def measure(self, formats: tuple[str, ...]) -> StatisticsTable:
        """Observe the next microbatches, all tokens, in BF16."""
        batches = self._lab.microbatches(self._setup.measured)
        return self._lab.statistics(batches, SnipConfig(formats=formats), all_tokens=True)

    def branch(self, plan: Plan) -> dict[str, Any]:
        """Train one branch under a plan; return LOSSES of `policies`."""
        lab, setup = self._lab, self._setup
        self._copy.restore(lab)
        lab.step = setup.warm
        losses: list[float] = []
        for k in range(setup.length):
            for group in _groups(lab):
                group["lr"] = self._rate * (1 - k / setup.length)
            losses += lab.train(1, plan)
        batches = lab.microbatches(setup.held_out, held_out=True)
        found: dict[str, Any] = {
            "loss": round(float(lab.losses(batches, plan).mean()), 6),
            "loss_bf16": round(float(lab.losses(batches).mean()), 6),
            "training_loss": round(sum(losses) / len(losses), 6),
            "quarters": [round(float(part.mean()), 6) for part in np.array_split(losses, 4)],
            "tokens": len(losses) * lab.config.global_batch_size * lab.config.seq_length,
        }
        return found


@dataclass(frozen=True)
class _Copy:
    """Weights and optimizer state of a lab.

    Attributes:
        tensors: see `_tensors`.
        counts: the optimizer's steps, one for each of its groups; None where it counts elsewhere.
    """

    tensors: list[torch.Tensor]
    counts: list[int | None]

    @classmethod
    def of(cls, lab: Lab) -> Self:
        tensors = [tensor.detach().clone() for tensor in _tensors(lab)]
        return cls(tensors, [group.get("step") for group in _groups(lab)])

    @torch.no_grad()
    def restore(self, lab: Lab) -> None:
        for tensor, saved in zip(_tensors(lab), self.tensors, strict=True):
            tensor.copy_(saved)
        for group, count in zip(_groups(lab), self.counts, strict=True):
            if count is not None:
                group["step"] = count

    def digest(self) -> str:
        found = hashlib.blake2b(repr(self.counts).encode(), digest_size=6)
        for tensor in self.tensors:
            found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
        return found.hexdigest()


REMEMBERED_BYTES = 2 << 30
"""Of random numbers: those of a branch of `small` are 1.7 GB."""

_drawn: dict[tuple[StreamKey, int, int, int], torch.Tensor | None] = {}


@dataclass(frozen=True)
class _RememberedStream(StochasticStream):
    """Draws what an earlier branch has drawn from memory; the numbers are the same.

    They depend on linear and iteration alone, and drawing them takes a fifth of a branch.
    """

    def draw(self, rows: int, cols: int, device: torch.device | None = None) -> Self:
        if self.drawn is not None:
            return self
        key = self.key, self.first_row, rows, cols
        if key not in _drawn:
            found = super().draw(rows, cols, device)
            used = sum(tensor.nbytes for tensor in _drawn.values() if tensor is not None)
            if used > REMEMBERED_BYTES:
                return found
            _drawn[key] = found.drawn
        return replace(self, drawn=_drawn[key])


@contextmanager
def _remembering_draws(lab: Lab) -> Iterator[None]:
    """Let the lab's linears use `_RememberedStream` inside the block."""
    runtime: Any = lab.model.runtime
    draw_anew = runtime.next_stream

    def next_stream(placement: Any, first_row: int = 0) -> StochasticStream:
        stream = draw_anew(placement, first_row)
        return _RememberedStream(stream.key, stream.columns, stream.first_row)

    runtime.next_stream = next_stream
    try:
        yield
    finally:
        del runtime.next_stream


def _parts(lab: Lab) -> list[Any]:
    optimizer: Any = lab.state.optimizer
    return [part.optimizer for part in getattr(optimizer, "chained_optimizers", [optimizer])]


def _groups(lab: Lab) -> list[dict[str, Any]]:
    return [group for part in _parts(lab) for group in part.param_groups]


def _tensors(lab: Lab) -> Iterator[torch.Tensor]:
    """Weights, main weights and moments."""
    for chunk in lab.state.model:
        yield from chunk.parameters()
    for part in _parts(lab):
        for group in part.param_groups:
            for weight in group["params"]:
                yield weight
                state = part.state.get(weight, {})
                yield from (v for v in state.values() if isinstance(v, torch.Tensor))


def _middle_layer(lab: Lab) -> Any:
    return unwrap_model(lab.state.model[0]).decoder.layers[lab.config.num_layers // 2]


def _outliers(lab: Lab) -> None:
    """Give the middle layer's fc1 outlier activations; the function stays the same.

    Four channels of its norm's weight are 30 times larger, their columns of fc1 30 times smaller.
    """
    layer = _middle_layer(lab)
    channels = slice(0, lab.config.hidden_size, lab.config.hidden_size // 4)
    with torch.no_grad():
        layer.pre_mlp_layernorm.weight[channels] *= 30
        layer.mlp.linear_fc1.weight[:, channels] /= 30
    lab.state.optimizer.reload_model_params()


def _fresh_block(lab: Lab) -> None:
    """Draw the weights of the middle layer anew."""
    layer = _middle_layer(lab)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in layer.parameters():
            if weight.ndim == 2:
                weight.copy_(0.02 * torch.randn(weight.shape, generator=generator))
    lab.state.optimizer.reload_model_params()


SCENARIOS = {"plain": lambda lab: None, "outliers": _outliers, "fresh-block": _fresh_block}
"""What is done to a warm model before branches start from it."""

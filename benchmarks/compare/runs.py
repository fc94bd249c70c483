"""Runs that branch from one checkpoint in this process.

A warm model is trained in BF16 and its weights and optimizer state are copied. Each branch starts
from the copy, trains under one plan on the same samples, and is evaluated on the same held-out
text. So two branches differ in their plan alone. The learning rate is constant before a branch and
falls linearly to zero in it, or the setup keeps the trainer's own schedule.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, Self

import numpy as np
import torch
from megatron.core.utils import unwrap_model

from benchmarks.compare.variants import Plan
from benchmarks.lab import Lab, open_lab
from megatron_snip.config import SnipConfig
from megatron_snip.errors import SnipError
from megatron_snip.quantizers.stochastic import StochasticStream, StreamKey
from megatron_snip.statistics.records import StatisticsTable
from megatron_snip.trainer.data import Datasets


@dataclass(frozen=True)
class Setup:
    """A model and how long it trains.

    Attributes:
        model: settings of the trainer over `benchmarks.lab.BASE`.
        warm: iterations in BF16 before the branches.
        length: iterations of a branch.
        held_out: microbatches of held-out text.
        measured: microbatches that the plans are made from.
        own_schedule: whether warm-up and branch together have the trainer's schedule of rates.
        prepare: changes the model before it trains.
    """

    model: dict[str, Any]
    warm: int
    length: int
    held_out: int = 48
    measured: int = 4
    own_schedule: bool = False
    prepare: Callable[[Lab], None] = lambda lab: None


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
def warm_model(
    setup: Setup, seed: int, data_seeds: int, scenario: str, saved: Path | None = None
) -> Iterator[WarmModel]:
    """Train a model of this seed in BF16; branches start from it.

    Args:
        setup: the model.
        seed: of its initial weights and data.
        data_seeds: how many different continuations of the data branches may have.
        scenario: of `SCENARIOS`; it changes the warm model, or each branch after half of it.
        saved: file of the warm model: it is read if it exists, else written.
    """
    total = setup.warm + data_seeds * setup.length
    values: dict[str, Any] = {"seed": 1234 + seed, "train_iters": total}
    if not setup.own_schedule:
        values["lr_decay_style"] = "constant"
    with open_lab({**setup.model, **values}) as lab, _remembering_draws(lab):
        setup.prepare(lab)
        if saved is not None and saved.exists():
            lab.train(1)  # the optimizer creates its moments
            _Copy.read(saved).restore(lab)
            lab.step = setup.warm
        else:
            lab.train(setup.warm)
            if saved is not None:
                _Copy.of(lab).write(saved)
        if not scenario.startswith(LATE):
            SCENARIOS[scenario](lab)
        yield WarmModel(setup, lab, scenario)


class WarmModel:
    """A trained model that branches start from."""

    def __init__(self, setup: Setup, lab: Lab, scenario: str) -> None:
        self._setup = setup
        self._scenario = scenario
        self._lab = lab
        self._datasets = lab.datasets
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

    def branch(
        self,
        plans: Sequence[Plan | None],
        data_seed: int,
        remake: Callable[[], Sequence[Plan]] | None = None,
    ) -> dict[str, Any]:
        """Train one branch; return its losses.

        Args:
            plans: each holds for an equal part of the iterations, in this order, and the last one
                also for the evaluation; None for BF16.
            data_seed: which continuation of the data.
            remake: returns the plans from half of the branch on; None keeps them.

        Returns:
            LOSSES of `policies`; None for the losses of a branch that ends early, because a loss or
            a gradient is not finite.
        """
        lab, setup = self._lab, self._setup
        self._restore()
        lab.step = setup.warm + data_seed * setup.length
        losses: list[float] = []
        for k in range(setup.length):
            if k == setup.length // 2:
                if self._scenario.startswith(LATE):
                    SCENARIOS[self._scenario](lab)
                plans = remake() if remake is not None else plans
            if not setup.own_schedule:
                for group in _groups(lab):
                    group["lr"] = self._rate * (1 - k / setup.length)
            try:
                losses += lab.train(1, plans[k * len(plans) // setup.length])
            except SnipError:  # a loss or a gradient that is not finite
                break
        tokens = len(losses) * lab.config.global_batch_size * lab.config.seq_length
        if len(losses) < setup.length:
            none = dict.fromkeys(("loss", "loss_bf16", "training_loss"))
            return {**none, "quarters": [], "tokens": tokens}
        batches = lab.microbatches(setup.held_out, held_out=True)
        return {
            "loss": float(lab.losses(batches, plans[-1]).mean()),
            "loss_bf16": float(lab.losses(batches).mean()),
            "training_loss": sum(losses) / len(losses),
            "quarters": [round(float(part.mean()), 6) for part in np.array_split(losses, 4)],
            "tokens": tokens,
        }

    def _restore(self) -> None:
        lab = self._lab
        lab.datasets = self._datasets
        self._copy.restore(lab)
        scheduler: Any = lab.state.scheduler
        scheduler.num_steps = self._setup.warm * lab.config.global_batch_size
        scheduler.step(increment=0)  # sets the rates of these steps


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

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls(*torch.load(path, weights_only=True))

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".part")
        torch.save((self.tensors, self.counts), partial)
        partial.replace(path)

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


class _Text:
    """Consecutive samples of a text, byte tokens; after its end they start over."""

    def __init__(self, text: bytes, length: int) -> None:
        self._tokens = torch.tensor(list(text))
        self._length = length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = index * self._length % (len(self._tokens) - self._length)
        tokens, labels = (self._tokens[start + k :][: self._length] for k in (0, 1))
        ones = torch.ones(self._length)
        ids = torch.arange(self._length)
        return {"tokens": tokens, "labels": labels, "loss_mask": ones, "position_ids": ids}


def _english(lab: Lab) -> None:
    """Replace the source code that the model was trained on by Python's help texts, in English."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    train, length = len(text) * 4 // 5, lab.config.seq_length
    lab.datasets = Datasets(_Text(text[:train], length), _Text(text[train:], length), {})


LATE = "late-"

SCENARIOS = {
    "plain": lambda lab: None,
    "outliers": _outliers,
    "fresh-block": _fresh_block,
    f"{LATE}outliers": _outliers,
    f"{LATE}english": _english,
}
"""What is done to a warm model before branches start from it, or to each after half of it."""

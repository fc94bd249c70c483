"""Where does FP4 in all linears lose much, or diverge? Runs of uniform recipes from scratch.

A cell is a small model and how it trains. Each cell trains in BF16, FP8 and FP4 (all linears, all
GEMMs) from the same weights on the same samples, with a cosine schedule, and is evaluated on
held-out text in its own precision. Preregistered in docs/preregistration.md, "The screening".
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from megatron.core.utils import unwrap_model

from benchmarks.compare import analysis
from benchmarks.compare.store import ResultStore
from benchmarks.lab import Lab, open_lab
from megatron_snip.errors import SnipError
from megatron_snip.formats import E2M1, FORMATS, Format, ScaleType
from megatron_snip.options import Option

HELD_OUT = 48
"""Microbatches of held-out text."""

LOSES = 0.03
"""In nat: a cell is hard if FP4 loses more than this to BF16, or diverges."""

DIVERGED = 0.5
"""In nat: a run diverged if its loss is not finite, or larger than that of BF16 by this."""

EXTRA_FORMATS = (
    Format("fp4_nearest", 4, E2M1),
    Format("fp4_tensor", 4, E2M1, scale=ScaleType.TENSOR, stochastic_grad=True),
)
"""Formats of the screening alone: gradients rounded to nearest; one scale for a tensor."""

HOT_CHANNELS = 4


@dataclass(frozen=True)
class Cell:
    """A model and how it trains.

    Attributes:
        model: settings of the trainer over `benchmarks.lab.BASE`.
        iterations: of a run.
        hot: factor of the activations in HOT_CHANNELS channels behind each norm; they stay hot.
        low: the FP4 format.
    """

    model: Mapping[str, Any] = field(default_factory=dict)
    iterations: int = 300
    hot: float = 1.0
    low: str = "fp4"


_RATE_4 = {"lr": 4e-3, "min_lr": 4e-4}
_DEEP = {"num_layers": 16}

CELLS: dict[str, Cell] = {
    "base": Cell(),
    "hot-10": Cell(hot=10.0),
    "rate-4": Cell(_RATE_4),
    "hot-30": Cell(hot=30.0),
    "rate-16": Cell({"lr": 1.6e-2, "min_lr": 1.6e-3}),
    "nearest": Cell(low="fp4_nearest"),
    "one-scale": Cell(low="fp4_tensor"),
    "hot-10-rate-4": Cell(_RATE_4, hot=10.0),
    "deep": Cell(_DEEP),
    "width-256": Cell({"hidden_size": 256, "ffn_hidden_size": 704}),
    "long": Cell(iterations=1500),
    "deep-rate-4": Cell({**_DEEP, **_RATE_4}),
    "long-hot-10": Cell(iterations=1500, hot=10.0),
}
"""In the order in which they run."""

MODEL = {"num_layers": 4, "ffn_hidden_size": 384, "lr": 1e-3, "min_lr": 1e-4}


def run_collapse(store: ResultStore, options: argparse.Namespace) -> None:
    """Make the rows that are missing, until `options.hours` of a core are used."""
    hours = math.inf if options.hours is None else options.hours
    end = time.process_time() + 3600 * hours
    with extra_formats():
        for name, cell in CELLS.items():
            for recipe in ("bf16", "fp8", cell.low):
                key = {"kind": "collapse", "setup": name, "scenario": "scratch", "low": cell.low}
                key |= {"seed": 0, "data_seed": 0, "variant": f"uniform-{recipe}"}
                if time.process_time() < end and not store.has(key):
                    store.add({**key, **run(cell, recipe)})


def run(cell: Cell, recipe: str) -> dict[str, Any]:
    """Train a cell in one format and return its losses; None where one is not finite."""
    values = {**MODEL, "seed": 1234, "train_iters": cell.iterations, **cell.model}
    with open_lab(values) as lab:
        if cell.hot != 1.0:
            make_hot(lab, cell.hot)
        plan = dict.fromkeys(lab.names, Option.uniform(recipe))
        losses: list[float] = []
        with suppress(SnipError):  # a loss or a gradient that is not finite ends the run
            while len(losses) < cell.iterations:
                losses += lab.train(1, plan)
        is_complete = len(losses) == cell.iterations
        batches = lab.microbatches(HELD_OUT, held_out=True)
        found = {
            "loss": float(lab.losses(batches, plan).mean()),
            "loss_bf16": float(lab.losses(batches).mean()),
            "training_loss": float(np.mean(losses[-50:])) if losses else math.nan,
            "max_loss": max(losses[cell.iterations // 3 :], default=math.nan),
            "hot": _hottest(lab),
        }
        if not is_complete:
            found |= {"loss": math.nan, "loss_bf16": math.nan}
        rounded = {k: round(v, 6) if math.isfinite(v) else None for k, v in found.items()}
        return {**rounded, "iterations": len(losses)}


def _norms_and_linears(lab: Lab) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the weight of each norm and that of the linear behind it."""
    for layer in unwrap_model(lab.state.model[0]).decoder.layers:
        yield layer.input_layernorm.weight, layer.self_attention.linear_qkv.weight
        yield layer.pre_mlp_layernorm.weight, layer.mlp.linear_fc1.weight


@torch.no_grad()
def make_hot(lab: Lab, factor: float) -> None:
    """Give the linears behind all norms hot channels; the function stays the same."""
    hidden = lab.config.hidden_size
    channels = slice(0, hidden, hidden // HOT_CHANNELS)
    for norm, linear in _norms_and_linears(lab):
        norm[channels] *= factor
        linear[:, channels] /= factor
    lab.state.optimizer.reload_model_params()


@torch.no_grad()
def _hottest(lab: Lab) -> float:
    """Return the largest weight of a norm over the norm's median: whether channels are hot."""
    ratios = [norm.abs().max() / norm.abs().median() for norm, _ in _norms_and_linears(lab)]
    return float(torch.stack(ratios).max())


@contextmanager
def extra_formats() -> Iterator[None]:
    """Within: EXTRA_FORMATS are formats."""
    FORMATS.update({extra.name: extra for extra in EXTRA_FORMATS})
    try:
        yield
    finally:
        for extra in EXTRA_FORMATS:
            del FORMATS[extra.name]


@dataclass(frozen=True)
class Found:
    """What a cell shows: gaps to BF16 in nat; infinite where a run diverged."""

    fp8: float
    low: float

    @property
    def is_hard(self) -> bool:
        """Whether FP4 loses much."""
        return self.low > LOSES

    @property
    def can_be_planned(self) -> bool:
        """Whether FP8, which plans keep the rest in, loses little."""
        return self.fp8 <= LOSES


def findings(rows: Sequence[dict[str, Any]]) -> dict[str, Found]:
    """Return what each cell shows whose three rows exist."""
    found = {}
    for name, cell in CELLS.items():
        losses = {row["variant"]: row["loss"] for row in rows if row["setup"] == name}
        variants = [f"uniform-{recipe}" for recipe in ("bf16", "fp8", cell.low)]
        if set(variants) <= losses.keys() and losses[variants[0]] is not None:
            bf16, *others = (losses[variant] for variant in variants)
            gaps = [np.inf if loss is None or loss > bf16 + DIVERGED else loss - bf16
                    for loss in others]  # fmt: skip
            found[name] = Found(*gaps)
    return found


def hardest(found: Mapping[str, Found]) -> str | None:
    """Return the cell in which policies are compared: the hardest of those that can be planned."""
    fit = {name: cell.low for name, cell in found.items() if cell.is_hard and cell.can_be_planned}
    return max(fit, key=lambda name: fit[name]) if fit else None


def collapse_report(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of the cells, and the hardest one."""
    found = findings(rows)
    lines = []
    for name, each in found.items():
        gaps = [f"{1e3 * gap:+.1f}" if math.isfinite(gap) else "diverged"
                for gap in (each.fp8, each.low)]  # fmt: skip
        hard = "yes" if each.is_hard else "no"
        lines.append((name, *gaps, hard if each.can_be_planned else f"{hard}, and FP8 as well"))
    head = ("cell", "FP8 over BF16, 1e-3 nat", "FP4 over BF16", f"over {LOSES} nat")
    text = f"{len(found)} of {len(CELLS)} cells; hardest: {hardest(found)}"
    return f"{text}\n\n{analysis.markdown(head, lines)}"

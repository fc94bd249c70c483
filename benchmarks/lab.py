"""A small Megatron model on real text in one process: it trains, is evaluated, and is observed."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func

from benchmarks.machine import has_gpu
from megatron_snip.collectives import Control
from megatron_snip.config import SnipConfig
from megatron_snip.linears.discovery import current_topology
from megatron_snip.linears.model import PlannedModel
from megatron_snip.options import BF16, Option
from megatron_snip.patches import cpu
from megatron_snip.run.step import TrainingStep, zero_gradients
from megatron_snip.statistics.gradients import gradient_norms
from megatron_snip.statistics.observer import StepObserver
from megatron_snip.statistics.records import StatisticsTable
from megatron_snip.statistics.sample import MeasureSettings
from megatron_snip.trainer.config import TrainConfig, make_train_config
from megatron_snip.trainer.data import Batch, Datasets, build_datasets, iteration_batches
from megatron_snip.trainer.loop import PlainTraining, train_step
from megatron_snip.trainer.model import (
    TrainingState,
    build_training_state,
    destroy_parallel_state,
    initialize_parallel_state,
)

BASE: dict[str, Any] = {
    "hidden_size": 128,
    "ffn_hidden_size": 256,
    "num_attention_heads": 4,
    "num_query_groups": 4,
    "seq_length": 128,
    "micro_batch_size": 8,
    "global_batch_size": 8,
    "lr": 3.0e-3,
    "min_lr": 3.0e-4,
    "lr_warmup_iters": 10,
    "eval_interval": 10**6,
    "eval_iters": 64,
}
"""A model that one core trains in minutes; a microbatch is 1024 byte tokens."""

SEED = 0
"""Of stochastic rounding and sampled tokens."""


@dataclass
class Lab:
    """A model in training.

    Attributes:
        config: what was built.
        state: model, optimizer, scheduler.
        datasets: training and held-out text.
        model: its planned linears.
        step: training steps made.
    """

    config: TrainConfig
    state: TrainingState
    datasets: Datasets
    model: PlannedModel
    step: int = 0

    @property
    def names(self) -> list[str]:
        """The linears, in model order."""
        return [linear.name for linear in self.model.job.linears]

    def train(self, steps: int, options: Mapping[str, Option] | None = None) -> list[float]:
        """Train on, every linear at its option (bf16 by default); return the losses."""
        self.model.apply(self._assignment(options))
        losses = []
        for _ in range(steps):
            self.step += 1
            samples, hook = self.datasets.train, PlainTraining()
            with self.model.runtime.training_pass(self.step):
                metrics = train_step(self.step, self.state, samples, hook)
            losses.append(metrics["loss"])
        return losses

    def microbatches(self, count: int, held_out: bool = False) -> list[Batch]:
        """Return `count` microbatches that training has not seen yet.

        Args:
            count: how many.
            held_out: from the held-out text instead of the steps to come.
        """
        samples = self.datasets.valid if held_out else self.datasets.train
        assert samples is not None
        iteration = 0 if held_out else self.step
        found: list[Batch] = []
        while len(found) < count:
            iteration += 1
            found += iteration_batches(samples, self.config, iteration, 0, 1)
        return found[:count]

    def losses(
        self, batches: Sequence[Batch], options: Mapping[str, Option] | None = None
    ) -> np.ndarray:
        """Return the loss of each microbatch, forward only, from FP32 logits."""
        self.model.apply(self._assignment(options))
        quantized_once = self.model.runtime.training_pass(self.step)
        with torch.no_grad(), fp32_logits(self.state.model[-1]), quantized_once:
            reports = self._run(batches, forward_only=True)
        return np.array([_mean(report) for report in reports])

    def statistics(
        self,
        batches: Sequence[Batch],
        snip: SnipConfig,
        options: Mapping[str, Option] | None = None,
        all_tokens: bool = False,
        seed: int = SEED,
    ) -> StatisticsTable:
        """Observe a forward-backward over these microbatches as a training iteration is observed.

        Args:
            batches: the microbatches.
            snip: gives the formats.
            options: what the linears run meanwhile (bf16 by default).
            all_tokens: measure all tokens and not a sample.
            seed: of the sample and of stochastic rounding.
        """
        self.model.apply(self._assignment(options))
        zero_gradients(self.state.model, self.state.optimizer)
        arguments = self._arguments(batches, forward_only=False)
        found = self.observed(arguments, snip, all_tokens=all_tokens, seed=seed)
        zero_gradients(self.state.model, self.state.optimizer)
        return found

    def observed(
        self,
        arguments: dict[str, Any],
        snip: SnipConfig,
        names: frozenset[str] | None = None,
        all_tokens: bool = False,
        seed: int = SEED,
    ) -> StatisticsTable:
        """Run a forward-backward observed; gradients stay.

        Args:
            arguments: of Megatron's schedule.
            snip: gives the formats.
            names: linears to measure; None measures all.
            all_tokens: measure all tokens and not a sample.
            seed: of the sample and of stochastic rounding.
        """
        topology, runtime = self.model.runtime.topology, self.model.runtime
        formats = self.model.measured_formats(snip.named_formats)
        settings = MeasureSettings(formats, self.step + 1, seed, names, all_tokens)
        weights, optimizer = self.model.weights(names), self.state.optimizer
        observer = StepObserver(settings, topology)
        training = TrainingStep(get_forward_backward_func(), arguments)
        with runtime.training_pass(self.step + 1), runtime.observed_by(observer):
            reports = training.run()
        loss = float(np.mean([_mean(report) for report in reports]))
        loss_scale = training.loss_scale()
        norms = partial(gradient_norms, weights, optimizer, topology, loss_scale)
        grad_scale = training.grad_scale(topology, loss_scale)
        return observer.table(self.model.job.linears, grad_scale, loss, norms)[0]

    def _assignment(self, options: Mapping[str, Option] | None) -> dict[str, Option]:
        return {name: (options or {}).get(name, BF16) for name in self.names}

    def _arguments(self, batches: Sequence[Batch], forward_only: bool) -> dict[str, Any]:
        arguments = self.state.arguments([iter(batches)], forward_only=forward_only)
        return {**arguments, "num_microbatches": len(batches)}

    def _run(self, batches: Sequence[Batch], forward_only: bool) -> list[dict[str, Any]]:
        function = get_forward_backward_func()
        return function(**self._arguments(batches, forward_only))


@contextmanager
def fp32_logits(model: torch.nn.Module) -> Iterator[None]:
    """Form a model's logits in FP32 from the hidden states and weights that it has.

    In BF16 a logit between 4 and 8 is rounded by up to 1/64. Over 2,048 tokens that moves a mean
    loss by some 1e-4, as much as quantizing most linears does, and says nothing about them.
    """
    (output,) = (m for name, m in model.named_modules() if name.endswith("output_layer"))

    def exact(module: Any, arguments: Any, named: Mapping[str, Any], result: Any) -> Any:
        logits, bias = result
        if logits.dtype == torch.float32:
            return result
        hidden = arguments[0] if arguments else named["input_"]
        weight = named.get("weight")
        weight = module.weight if weight is None else weight
        return torch.nn.functional.linear(hidden.float(), weight.float()), bias

    handle = output.register_forward_hook(exact, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def open_lab(values: Mapping[str, Any]) -> Iterator[Lab]:
    """Build a model in this process (a single rank); everything is undone at the end.

    Args:
        values: of `TrainConfig`, over `BASE`; `train_iters` bounds the data prepared.
    """
    installed = False if has_gpu() else cpu.install()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        config = make_train_config({**BASE, "run_dir": Path(folder), **values})
        dist.init_process_group(
            "nccl" if has_gpu() else "gloo", store=dist.HashStore(), rank=0, world_size=1
        )
        stack.callback(dist.destroy_process_group)
        initialize_parallel_state(config)
        stack.callback(destroy_parallel_state)
        state = build_training_state(config)
        datasets = build_datasets(config, Control())
        model = PlannedModel(list(state.model), current_topology(), SEED)
        model.install()
        stack.callback(model.uninstall)
        yield Lab(config, state, datasets, model)
    if installed:
        cpu.uninstall()


def _mean(report: dict[str, Any]) -> float:
    total, count = next(iter(report.values())).tolist()
    return total / count

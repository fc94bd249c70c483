"""The training loop: Megatron's own step, with SNIP's hook around it.

    for each step:
        zero gradients -> hook.forward_backward -> optimizer -> scheduler
        evaluate where it is due
        hook.end_iteration
        save where it is due, and stop where that was asked for

Reported losses are means over tokens, microbatches and data-parallel ranks, the same number on
every rank. An evaluation runs forward over the same held-out batches each time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state

from megatron_snip.trainer.checkpoint import Progress
from megatron_snip.trainer.config import TrainConfig
from megatron_snip.trainer.data import Batch, DataRank, Datasets, Samples, step_batches
from megatron_snip.trainer.hooks import TrainingHook
from megatron_snip.trainer.model import TrainingState
from megatron_snip.trainer.runner import DataIterator, StepRunner
from megatron_snip.trainer.saver import Saver
from megatron_snip.trainer.step import mean_loss


@dataclass(frozen=True)
class TrainingResult:
    """How a run ended.

    Attributes:
        steps: training steps done, with those before a checkpoint.
        loss: of the last step; NaN if there was nothing left to do.
        first_validation_loss: before the first step; None where eval_iters is 0.
        validation_loss: after the last step; None where eval_iters is 0.
        seconds: wall time of the loop.
        stopped: why the run ended before its last step, e.g. `SIGTERM`; None if it did not.
    """

    steps: int
    loss: float
    first_validation_loss: float | None
    validation_loss: float | None
    seconds: float
    stopped: str | None = None


Listener = Callable[[int, dict[str, Any]], None]
"""Called after each step with its number and metrics (see `train`), e.g. a progress bar."""


def train(
    config: TrainConfig,
    state: TrainingState,
    datasets: Datasets,
    hook: TrainingHook,
    listener: Listener,
    start: Progress | None = None,
    saver: Saver | None = None,
) -> TrainingResult:
    """All ranks: train until `train_iters` steps are done.

    The metrics of a step are: loss, before its update; grad_norm, global and before clipping; lr;
    tokens_per_s, of the step itself (refreshes within its forward-backward included, evaluation
    not); validation_loss where it was measured, on step 0 before its update and on others after it.

    Args:
        config: the run's settings.
        state: model, optimizer and scheduler.
        datasets: training and held-out samples.
        hook: acts around every step.
        listener: told of every step, on every rank.
        start: go on from here, with model, optimizer and scheduler as they were then.
        saver: asked after every step whether to stop.
    """
    begin = time.perf_counter()
    state.runner.defer_gathers()
    if start is None:
        with hook.evaluation():
            first = validation = evaluate(state.runner, datasets.valid, config.eval_iters)
        start = Progress()
    else:
        first, validation = start.first_validation_loss, start.validation_loss
    metrics: dict[str, Any] = {"loss": math.nan}
    done, stopped = start.step, None
    while done < config.train_iters and stopped is None:
        step, iteration = done, done + 1
        metrics = train_step(step, config, state, datasets.train, hook)
        if step == start.step:
            state.runner.overlap_gathers()
        if step == 0 and first is not None:
            metrics["validation_loss"] = first
        if iteration % config.eval_interval == 0 or iteration == config.train_iters:
            with hook.evaluation():
                validation = evaluate(state.runner, datasets.valid, config.eval_iters)
            if step > 0 and validation is not None:
                metrics["validation_loss"] = validation
        hook.end_iteration(iteration, metrics)
        fraction = hook.lowest_precision_fraction
        listener(iteration, {**metrics, "lowest_precision_fraction": fraction})
        done = step + 1
        if saver is not None:
            stopped = saver.after_step(done, first, validation)
    seconds = time.perf_counter() - begin
    return TrainingResult(done, metrics["loss"], first, validation, seconds, stopped)


def train_step(
    step: int, config: TrainConfig, state: TrainingState, samples: Samples, hook: TrainingHook
) -> dict[str, Any]:
    """All ranks: make one training step; return its metrics."""
    begin = time.perf_counter()
    runner = state.runner
    runner.zero_gradients()
    arguments = runner.arguments(_iterators(runner, samples, step))
    reports = hook.forward_backward(step + 1, runner.function, **arguments)
    lr = max(group["lr"] for group in state.optimizer.param_groups)
    updated, grad_norm, _ = state.optimizer.step()
    if updated:
        state.scheduler.step(increment=config.global_batch_size)
    loss = mean_loss(reports)
    tokens = config.global_batch_size * config.seq_length
    return {
        "loss": loss,
        "grad_norm": float(grad_norm),
        "lr": float(lr),
        "tokens_per_s": tokens / (time.perf_counter() - begin),
    }


@torch.no_grad()
def evaluate(runner: StepRunner, samples: Samples | None, eval_iters: int) -> float | None:
    """All ranks: return the mean loss over the first `eval_iters` global batches.

    Returns:
        The loss, or None without samples.
    """
    if samples is None:
        return None
    for chunk in runner.model:
        chunk.eval()
    losses = []
    with runner.gathered():
        for step in range(eval_iters):
            arguments = runner.arguments(_iterators(runner, samples, step), forward_only=True)
            losses.append(mean_loss(runner.function(**arguments)))
    for chunk in runner.model:
        chunk.train()
    return sum(losses) / len(losses)


def _iterators(runner: StepRunner, samples: Samples, step: int) -> DataIterator:
    """Return this rank's microbatches of a step, as the schedule takes them."""
    rank = DataRank(
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
        runner.micro_batch_size,
        runner.num_microbatches,
    )

    def fresh() -> Iterator[Batch]:
        return step_batches(samples, rank, step)

    chunks = len(runner.model)
    return fresh() if chunks == 1 else [fresh() for _ in range(chunks)]

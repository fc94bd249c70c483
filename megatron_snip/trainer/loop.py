"""The training loop: Megatron's iteration, with SNIP's controller around forward and backward.

    for each iteration:
        zero gradients -> hook.forward_backward -> optimizer -> scheduler
        evaluate if it is due
        hook.end_iteration
        save if it is due; stop if a signal asks for it

Losses are means over tokens, microbatches and data-parallel ranks, the same number on every rank.
An evaluation runs over the same validation batches each time. Iterations count from 1.
"""

import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_snip.collectives import Control
from megatron_snip.errors import SnipError
from megatron_snip.reporting.events import Event, Metrics, Reporter, Writer
from megatron_snip.run.controller import SnipController
from megatron_snip.run.step import ForwardBackward, Results, run_once, zero_gradients
from megatron_snip.trainer.checkpoint import STOP_SIGNALS, Progress
from megatron_snip.trainer.data import Datasets, Samples, iteration_batches
from megatron_snip.trainer.model import LOSS, TrainingState


class PlainTraining:
    """The controller's interface for training without SNIP; metrics go to the writers."""

    def __init__(self, writers: Sequence[Writer] = ()) -> None:
        self._reporter = Reporter(writers)

    def forward_backward(self, iteration: int, function: ForwardBackward, **kwargs: Any) -> Results:
        """Call Megatron's function."""
        return run_once(function, **kwargs)

    def evaluation(self) -> AbstractContextManager[ForwardBackward]:
        """Return a context that changes nothing."""
        return nullcontext(run_once)

    def end_iteration(self, iteration: int, metrics: dict[str, Any]) -> None:
        """Report the metrics."""
        values = Metrics({**metrics, "lowest_precision_fraction": 0.0})
        self._reporter.write(Event(iteration, values))

    def state(self, iteration: int) -> None:
        """Return None: there is no state to save."""

    def close(self) -> None:
        """Close the writers."""
        self._reporter.close()


TrainingHook = SnipController | PlainTraining


@contextmanager
def stop_requests(control: Control) -> Iterator[Callable[[], str | None]]:
    """Within: a stop signal ends the run after the iteration.

    Schedulers send a signal some time before the job ends. One rank or all may get it, and at
    different moments, so the ranks agree after every iteration.

    Args:
        control: the control plane of all ranks.

    Yields:
        A function that all ranks call: the name of a signal that any rank received, or None.
    """
    received = 0

    def receive(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received = number

    def agreed() -> str | None:
        largest = torch.tensor([received])
        control.sum_(torch.zeros(1), maxima=largest)
        number = int(largest.item())
        return signal.Signals(number).name if number else None

    handled = set(STOP_SIGNALS)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # by `nohup`
        handled.remove(signal.SIGHUP)
    previous = {number: signal.signal(number, receive) for number in handled}
    try:
        yield agreed
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class TrainingResult:
    """How a run ended.

    Attributes:
        iterations: Number of iterations done, including those before a resume.
        loss: Loss of the last iteration; NaN if none was left to do.
        first_validation_loss: Validation loss before the first iteration; None if eval_iters is 0.
        validation_loss: Validation loss of the last evaluation; None if eval_iters is 0. It is that
            after the last iteration, unless the run was stopped.
        seconds: Wall time of the loop.
        stopped: Why the run ended early, such as `SIGTERM`; None if it did not.
    """

    iterations: int
    loss: float
    first_validation_loss: float | None
    validation_loss: float | None
    seconds: float
    stopped: str | None = None


def train(
    state: TrainingState,
    datasets: Datasets,
    hook: TrainingHook,
    start: Progress,
    save: Callable[[Progress], None] | None = None,
    stop: Callable[[], str | None] = lambda: None,
) -> TrainingResult:
    """All ranks: train until `train_iters` iterations are done.

    Metrics of an iteration: loss, before its update; grad_norm, global and before clipping; lr;
    tokens_per_s and step_s, with measuring and without evaluation; validation_loss if it was
    evaluated (iteration 1: before its update, others: after it).

    Args:
        state: Model, optimizer, scheduler and settings.
        datasets: Training and validation samples.
        hook: SNIP's controller or `PlainTraining`.
        start: Where to begin; model, optimizer and scheduler are loaded already.
        save: Saves a checkpoint; all ranks call it. None never saves.
        stop: Returns why the run ends after this iteration, or None; all ranks call it.

    Raises:
        SnipError: on every rank, if the loss or gradient norm is not finite or a checkpoint cannot
            be saved.
    """
    begin = time.perf_counter()
    config = state.config
    first = start.first_validation_loss
    validation = start.validation_loss
    if start.iteration == 0:
        first = validation = evaluate(state, datasets.valid, hook)
    metrics: dict[str, Any] = {"loss": math.nan}
    iteration = start.iteration
    stopped = None
    while iteration < config.train_iters and stopped is None:
        iteration += 1
        metrics = train_step(iteration, state, datasets.train, hook)
        if iteration == 1 and first is not None:
            metrics["validation_loss"] = first
        if iteration % config.eval_interval == 0 or iteration == config.train_iters:
            validation = evaluate(state, datasets.valid, hook)
            if iteration > 1 and validation is not None:
                metrics["validation_loss"] = validation
        hook.end_iteration(iteration, metrics)
        is_last = iteration == config.train_iters
        stopped = stop()
        is_due = config.save_interval is not None and iteration % config.save_interval == 0
        if save is not None and (is_due or is_last or stopped is not None):
            snip = hook.state(iteration)
            progress = replace(
                start,
                iteration=iteration,
                first_validation_loss=first,
                validation_loss=validation,
                snip=None if snip is None else snip.to_dict(),
            )
            save(progress)
        if is_last:  # a signal in the last iteration stops nothing
            stopped = None
    return TrainingResult(
        iterations=iteration,
        loss=metrics["loss"],
        first_validation_loss=first,
        validation_loss=validation,
        seconds=time.perf_counter() - begin,
        stopped=stopped,
    )


def train_step(
    iteration: int, state: TrainingState, samples: Samples, hook: TrainingHook
) -> dict[str, Any]:
    """All ranks: make one iteration; return its metrics.

    Raises:
        SnipError: on every rank; see `train`.
    """
    begin = time.perf_counter()
    zero_gradients(state.model, state.optimizer)
    arguments = state.arguments(_iterators(state, samples, iteration))
    reports = hook.forward_backward(iteration, get_forward_backward_func(), **arguments)
    lr = max(group["lr"] for group in state.optimizer.param_groups)
    loss = mean_loss(reports)
    _check_finite(iteration, "loss", loss)
    updated, grad_norm, _ = state.optimizer.step()
    grad_norm = float(grad_norm)
    _check_finite(iteration, "gradient norm", grad_norm)
    if updated:
        state.scheduler.step(increment=state.config.global_batch_size)
    step_s = time.perf_counter() - begin
    speed = state.config.global_batch_size * state.config.seq_length / step_s
    metrics = {"loss": loss, "grad_norm": grad_norm, "lr": float(lr)}
    return metrics | {"tokens_per_s": speed, "step_s": step_s}


@torch.no_grad()
def evaluate(state: TrainingState, samples: Samples | None, hook: TrainingHook) -> float | None:
    """All ranks: return the mean loss over `eval_iters` global batches; None without samples."""
    if samples is None:
        return None
    for chunk in state.model:
        chunk.eval()
    losses = []
    with hook.evaluation() as run, state.gathered():
        schedule = get_forward_backward_func()
        for iteration in range(1, state.config.eval_iters + 1):
            iterators = _iterators(state, samples, iteration)
            losses.append(mean_loss(run(schedule, **state.arguments(iterators, True))))
    for chunk in state.model:
        chunk.train()
    return sum(losses) / len(losses)


def _iterators(state: TrainingState, samples: Samples, iteration: int) -> list[Iterator[Any]]:
    """Return one iterator of the microbatches per model chunk, as Megatron's schedules take."""
    rank = parallel_state.get_data_parallel_rank()
    size = parallel_state.get_data_parallel_world_size()
    return [iteration_batches(samples, state.config, iteration, rank, size) for _ in state.model]


def mean_loss(reports: list[dict[str, Any]]) -> float:
    """All ranks: return the loss over microbatches and data-parallel ranks.

    Only the last pipeline stage has reports.
    """
    total = torch.zeros(2, dtype=torch.float64).to(torch.cuda.current_device())
    if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        for report in reports:
            total += report[LOSS].double()
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    group = parallel_state.get_pipeline_model_parallel_group()
    dist.broadcast(total, parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
    return float(total[0] / total[1])


def _check_finite(iteration: int, name: str, value: float) -> None:
    if not math.isfinite(value):
        raise SnipError(
            f"iteration {iteration}: the {name} is {value}; the run ends without a checkpoint"
        )

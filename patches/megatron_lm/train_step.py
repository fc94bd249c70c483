"""A training iteration: what SNIP does in it, and what it reports after it.

Megatron's `train_step` gets its schedule as an argument and may call it several times in one
iteration (its rerun state machine repeats an iteration whose result it doubts). SNIP puts the
controller's `forward_backward` in the schedule's place.

Only ranks of the last pipeline stage have losses, and reading one waits for the device. So the last
rank broadcasts them, at Megatron's log interval and after evaluations.
"""

import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_snip.patches.registry import Call, Session, patch
from megatron_snip.statistics.optimizer_state import learning_rate
from megatron_snip.topology import Topology

TRAINING = "megatron.training.training"


@patch(TRAINING, "train_step", needs=("forward_backward_func", "iteration"), returns=6)
def train_step(call: Call, session: Session) -> Any:
    """Run the schedule through the controller."""
    controller, metrics, graphs = session.controller, session.metrics, session.graphs
    if controller is None or metrics is None or graphs is None:
        return call.run()
    graphs.was_slow = False
    graphs.capture_again(session.graph_helpers)
    schedule = partial(graphs.run_step, call.arguments["forward_backward_func"])
    iteration = _iterations_done(call.arguments.get("iteration")) + 1
    call.arguments["forward_backward_func"] = partial(
        controller.forward_backward, iteration, schedule
    )
    begin = time.perf_counter()
    result = call.run()
    seconds = 0.0 if graphs.was_slow else time.perf_counter() - begin
    metrics.trained(seconds, losses=result[0], grad_norm=result[5])
    return result


@patch(TRAINING, "post_training_step_callbacks", needs=("optimizer", "iteration"))
def step_end(call: Call, session: Session) -> Any:
    """All ranks: report an iteration, after Megatron's log and evaluation."""
    result = call.run()  # a count of FLOPs that the training loop goes on with
    if session.controller is None or session.metrics is None:
        return result
    from megatron.core.num_microbatches_calculator import get_current_global_batch_size
    from megatron.training.global_vars import get_args

    args, iteration = get_args(), call.arguments["iteration"]
    values = session.metrics.finish(
        lr=learning_rate(call.arguments["optimizer"]),
        tokens=get_current_global_batch_size() * int(args.seq_length),
        log_losses=iteration % int(args.log_interval) == 0,
    )
    session.controller.end_iteration(iteration, values)
    return result


@patch(TRAINING, "evaluate", needs=("forward_step_func",), returns=1)
def evaluation(call: Call, session: Session) -> Any:
    """Evaluate in the plan's precision, in BF16, or in both."""
    if session.controller is None or session.metrics is None:
        return call.run()
    with session.controller.evaluation() as session.paired_run:
        try:
            result = call.run()
        finally:
            session.paired_run = None
    session.metrics.evaluated(result[0])
    return result


@patch(TRAINING, "get_forward_backward_func")
def schedule(call: Call, session: Session) -> Any:
    """Return Megatron's schedule, or what runs it in two precisions."""
    function = call.run()
    return function if session.paired_run is None else partial(session.paired_run, function)


class StepMetrics:
    """Collects one iteration's metrics; `finish` returns and clears them."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._seconds = 0.0
        self._losses: dict[str, Any] = {}
        self._grad_norm: Any = None

    def trained(self, seconds: float, losses: Any, grad_norm: Any) -> None:
        """Record a training step.

        Args:
            seconds: that it took; 0 if they say nothing about later steps.
            losses: {name: loss} as Megatron logs it; empty where it is not known.
            grad_norm: global, before clipping, or None.
        """
        self._seconds = seconds
        self._losses["loss"] = _first(losses)
        self._grad_norm = grad_norm

    def evaluated(self, losses: Any) -> None:
        """Record an evaluation; `losses` as in `trained`."""
        self._losses["validation_loss"] = _first(losses)

    def finish(self, lr: float | None, tokens: int, log_losses: bool) -> dict[str, Any]:
        """All ranks: return the iteration's metrics and clear them.

        Args:
            lr: learning rate, or None on a rank without an optimizer.
            tokens: tokens of the global batch.
            log_losses: whether to report the loss; the same on all ranks.

        Returns:
            grad_norm, lr, tokens_per_s, step_s; loss with `log_losses`; validation_loss after an
            evaluation. A loss that the last rank does not have is NaN.
        """
        names = [name for name in self._losses if log_losses or name != "loss"]
        values: dict[str, Any] = dict(zip(names, self._from_last_rank(names), strict=True))
        if self._grad_norm is not None:
            values["grad_norm"] = float(self._grad_norm)
        if lr is not None:
            values["lr"] = lr
        if self._seconds > 0.0:
            values |= {"tokens_per_s": tokens / self._seconds, "step_s": self._seconds}
        self._seconds, self._losses, self._grad_norm = 0.0, {}, None
        return values

    def _from_last_rank(self, names: Sequence[str]) -> list[float]:
        """All ranks: return the last rank's losses; NaN for one that it does not have."""
        known = [self._losses[name] for name in names]
        numbers = torch.tensor(
            [math.nan if v is None else float(v) for v in known], dtype=torch.float64
        )
        group = self._topology.control
        if names and group is not None:
            dist.broadcast(numbers, src=self._topology.world_size - 1, group=group)
        found: list[float] = numbers.tolist()
        return found


def _iterations_done(passed: Any) -> int:
    if passed is None:  # scripts that call `train_step` themselves may leave it out
        from megatron.training.global_vars import get_args

        passed = get_args().curr_iteration
    return int(passed)


def _first(losses: Any) -> Any:
    """Return the first loss of {name: loss}; Megatron's training loss comes first."""
    return next(iter(losses.values()), None) if isinstance(losses, Mapping) else None

"""A training iteration: what SNIP does in it, and what it reports after it, in any training loop.

A loop's `train_step` gets Megatron's forward-backward function as an argument, and may call it
several times in one iteration (Megatron's rerun state machine repeats an iteration whose result it
doubts). SNIP puts the controller's `forward_backward` in its place, and collects the metrics.
"""

import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from megatron_snip.patches.registry import Call, Session
from megatron_snip.topology import Topology


def run_step(call: Call, session: Session, iteration: int) -> Any:
    """Run a call of a loop's `train_step`; its forward-backward function runs in the controller.

    Args:
        call: the call; it has an argument `forward_backward_func`. Item 0 of its result are the
            losses, item 5 is the gradients' norm.
        session: what the patches of this process share.
        iteration: 1-based.
    """
    controller = session.controller
    graphs = session.graphs
    metrics = session.metrics
    if controller is None or graphs is None or metrics is None:
        return call.run()
    graphs.was_slow = False
    graphs.capture_again(session.graph_helpers)
    function = partial(graphs.run_step, call.arguments["forward_backward_func"])
    call.arguments["forward_backward_func"] = partial(
        controller.forward_backward, iteration, function
    )
    begin = time.perf_counter()
    result = call.run()
    seconds = 0.0 if graphs.was_slow else time.perf_counter() - begin
    metrics.trained(seconds, losses=result[0], grad_norm=result[5])
    return result


def end_step(
    session: Session, iteration: int, optimizer: Any, seq_length: int, log_interval: int
) -> None:
    """All ranks: report an iteration, after the loop's log and evaluation.

    Args:
        session: what the patches of this process share.
        iteration: Megatron's iteration, 1-based.
        optimizer: Megatron's optimizer.
        seq_length: tokens of a sample.
        log_interval: iterations between two that the loop logs.
    """
    controller = session.controller
    metrics = session.metrics
    if controller is None or metrics is None:
        return
    from megatron.core.num_microbatches_calculator import get_current_global_batch_size

    # A rank without trainable parameters has no groups.
    groups = getattr(optimizer, "param_groups", None) or []
    rates = [float(group["lr"]) for group in groups if group.get("lr") is not None]
    values = metrics.finish(
        lr=max(rates, default=None),
        tokens=get_current_global_batch_size() * seq_length,
        log_losses=iteration % log_interval == 0,
    )
    controller.end_iteration(iteration, values)


def run_evaluation(call: Call, session: Session, of_test_set: bool) -> Any:
    """Run a call of a loop's `evaluate` in the plan's precision, in BF16, or in both.

    Item 0 of its result are the losses.
    """
    controller = session.controller
    metrics = session.metrics
    if controller is None or metrics is None:
        return call.run()
    name = controller.evaluations.next_name(of_test_set)
    with controller.evaluation(name) as session.evaluating:
        try:
            result = call.run()
        finally:
            session.evaluating = None
    metrics.evaluated(result[0], name)
    if not controller.evaluations.iteration_is_open:
        controller.end_evaluation(metrics.finish(lr=None, tokens=0, log_losses=False))
    return result


def function_of_evaluation(call: Call, session: Session) -> Any:
    """Run a call of `get_forward_backward_func`; in an evaluation, return what runs it there."""
    function = call.run()
    return function if session.evaluating is None else partial(session.evaluating, function)


class StepMetrics:
    """Collects one iteration's metrics; `finish` returns and clears them.

    Only ranks of the last pipeline stage have losses, and reading one waits for the device. So the
    last rank broadcasts them, where the loop logs them and after evaluations.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._seconds = 0.0
        self._losses: dict[str, Any] = {}
        self._grad_norm: Any = None

    def trained(self, seconds: float, losses: Any, grad_norm: Any) -> None:
        """Record a training step.

        Args:
            seconds: seconds that the step took; 0 if later steps will take another time.
            losses: {name: loss} as Megatron logs it; empty where it is not known.
            grad_norm: norm of all gradients before clipping, or None.
        """
        self._seconds = seconds
        self._losses["loss"] = _first(losses)
        self._grad_norm = grad_norm

    def evaluated(self, losses: Any, name: str) -> None:
        """Record the evaluation called `name`; `losses` as in `trained`."""
        self._losses[f"{name}_loss"] = _first(losses)

    def finish(self, lr: float | None, tokens: int, log_losses: bool) -> dict[str, Any]:
        """All ranks: return the iteration's metrics and clear them.

        Args:
            lr: learning rate, or None on a rank without an optimizer.
            tokens: tokens of the global batch.
            log_losses: whether to report the loss; the same on all ranks.

        Returns:
            grad_norm, lr, tokens_per_s, step_s; loss with `log_losses`; <name>_loss after an
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
        self._seconds = 0.0
        self._losses = {}
        self._grad_norm = None
        return values

    def _from_last_rank(self, names: Sequence[str]) -> list[float]:
        """All ranks: return the last rank's losses; NaN for one that it does not have."""
        known = [self._losses[name] for name in names]
        numbers = torch.tensor(
            [math.nan if v is None else float(v) for v in known], dtype=torch.float64
        )
        if names:
            self._topology.control.broadcast_(numbers, self._topology.world_size - 1)
        found: list[float] = numbers.tolist()
        return found


def _first(losses: Any) -> Any:
    """Return the first loss of {name: loss}; Megatron's training loss comes first."""
    return next(iter(losses.values()), None) if isinstance(losses, Mapping) else None

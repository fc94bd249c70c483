"""A training iteration: what SNIP does in it, and what it reports after it, in any training loop.

A loop's `train_step` gets Megatron's forward-backward function as an argument, and may call it
several times in one iteration (Megatron's rerun state machine repeats an iteration whose result it
doubts). SNIP puts the controller's `forward_backward` in its place.
"""

import time
from functools import partial
from typing import Any

from megatron_snip.patches.registry import Call, Session
from megatron_snip.statistics.optimizer_state import learning_rate


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

    values = metrics.finish(
        lr=learning_rate(optimizer),
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

"""A training iteration: what SNIP does in it, and what it reports after it.

Megatron's `train_step` gets its schedule as an argument and may call it several times in one
iteration (its rerun state machine repeats an iteration whose result it doubts). SNIP puts the
controller's `forward_backward` in the schedule's place.
"""

import time
from functools import partial
from typing import Any

from megatron_snip.patches.registry import Call, Session, patch
from megatron_snip.statistics.optimizer_state import learning_rate

TRAINING = "megatron.training.training"


@patch(TRAINING, "train_step", needs=("forward_backward_func", "iteration"), returns=6)
def train_step(call: Call, session: Session) -> Any:
    """Run the schedule through the controller."""
    controller, graphs = session.controller, session.graphs
    if controller is None or graphs is None:
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
    controller.metrics.trained(seconds, losses=result[0], grad_norm=result[5])
    return result


@patch(TRAINING, "post_training_step_callbacks", needs=("optimizer", "iteration"))
def step_end(call: Call, session: Session) -> Any:
    """All ranks: report an iteration, after Megatron's log and evaluation."""
    result = call.run()  # a count of FLOPs that the training loop goes on with
    controller = session.controller
    if controller is None:
        return result
    from megatron.core.num_microbatches_calculator import get_current_global_batch_size
    from megatron.training.global_vars import get_args

    args = get_args()
    iteration = call.arguments["iteration"]
    values = controller.metrics.finish(
        lr=learning_rate(call.arguments["optimizer"]),
        tokens=get_current_global_batch_size() * int(args.seq_length),
        log_losses=iteration % int(args.log_interval) == 0,
    )
    controller.end_iteration(iteration, values)
    return result


@patch(TRAINING, "evaluate", needs=("forward_step_func",), returns=1)
def evaluation(call: Call, session: Session) -> Any:
    """Evaluate in the plan's precision, in BF16, or in both."""
    controller = session.controller
    if controller is None:
        return call.run()
    with controller.evaluation() as session.evaluating:
        try:
            result = call.run()
        finally:
            session.evaluating = None
    controller.metrics.evaluated(result[0])
    return result


@patch(TRAINING, "get_forward_backward_func")
def schedule(call: Call, session: Session) -> Any:
    """Return Megatron's schedule; within an evaluation, what runs it there."""
    function = call.run()
    return function if session.evaluating is None else partial(session.evaluating, function)


def _iterations_done(passed: Any) -> int:
    if passed is None:  # scripts that call `train_step` themselves may leave it out
        from megatron.training.global_vars import get_args

        passed = get_args().curr_iteration
    return int(passed)

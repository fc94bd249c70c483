"""The training step: a plan is applied before it, a refresh measures inside it.

Megatron's `train_step` gets the schedule as an argument and may call it several times for one
iteration (its rerun state machine repeats a step whose result it doubts). The schedule that we put
in its place measures at most once an iteration and begins a new pass at each repetition, so that a
repeated step draws the same random numbers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron_snip.patches.seam import Function, Seam, bound, wrapping
from megatron_snip.patches.session import Session
from megatron_snip.patches.target import Target


def _wrap(original: Function, session: Session) -> Function:
    @wrapping(original)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        controller, metrics = session.controller, session.metrics
        if controller is None or metrics is None:
            return original(*args, **kwargs)
        call = bound(original, args, kwargs)
        iteration = _iteration(call.arguments.get("iteration"))
        metrics.begin()
        schedule = call.arguments["forward_backward_func"]
        call.arguments["forward_backward_func"] = partial(
            controller.forward_backward, iteration, schedule
        )
        result = original(*call.args, **call.kwargs)
        metrics.trained(losses=result[0], grad_norm=result[5])
        return result

    return train_step


def _iteration(done: Any) -> int:
    """Megatron's iteration (1-based); it passes the number of iterations done."""
    if done is None:  # scripts that call `train_step` themselves may leave it out
        from megatron.training.global_vars import get_args

        done = get_args().curr_iteration
    return int(done) + 1


SEAM = Seam(
    name="train-step",
    purpose="applies plans between steps, measures in a refresh's step",
    target=Target(
        "megatron.training.training", "train_step", ("forward_backward_func", "iteration")
    ),
    wrap=_wrap,
)

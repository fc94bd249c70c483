"""The end of a training step: after Megatron's log and evaluation, before its checkpoint."""

from __future__ import annotations

from typing import Any

from megatron_snip.patches.seam import Function, Seam, bound, wrapping
from megatron_snip.patches.session import Session
from megatron_snip.patches.target import Target


def _wrap(original: Function, session: Session) -> Function:
    @wrapping(original)
    def post_training_step_callbacks(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)  # a FLOP count that the training loop goes on with
        if session.controller is not None:
            call = bound(original, args, kwargs)
            _report(session, call.arguments["iteration"], call.arguments["optimizer"])
        return result

    return post_training_step_callbacks


def _report(session: Session, iteration: int, optimizer: Any) -> None:
    """All ranks: report an iteration."""
    from megatron.core.num_microbatches_calculator import get_current_global_batch_size
    from megatron.training.global_vars import get_args

    assert session.controller is not None and session.metrics is not None
    args = get_args()
    values = session.metrics.finish(
        lr=_learning_rate(optimizer),
        tokens=get_current_global_batch_size() * int(args.seq_length),
        log_losses=iteration % int(args.log_interval) == 0,
    )
    session.controller.end_iteration(iteration, values)


def _learning_rate(optimizer: Any) -> float | None:
    """The largest over parameter groups that this rank holds, or None."""
    groups = getattr(optimizer, "param_groups", None) or []
    rates = [float(group["lr"]) for group in groups if group.get("lr") is not None]
    return max(rates, default=None)


SEAM = Seam(
    name="step-end",
    purpose="reports the step",
    target=Target(
        "megatron.training.training", "post_training_step_callbacks", ("optimizer", "iteration")
    ),
    wrap=_wrap,
)

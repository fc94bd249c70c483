"""Evaluation: in the plan's precision or in BF16 (`--snip-eval-precision`)."""

from __future__ import annotations

from typing import Any

from megatron_snip.patches.seam import Function, Seam, wrapping
from megatron_snip.patches.session import Session
from megatron_snip.patches.target import Target


def _wrap(original: Function, session: Session) -> Function:
    @wrapping(original)
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        if session.controller is None or session.metrics is None:
            return original(*args, **kwargs)
        with session.controller.evaluation():
            result = original(*args, **kwargs)
        session.metrics.evaluated(result[0])
        return result

    return evaluate


SEAM = Seam(
    name="evaluation",
    purpose="evaluates in the precision that was asked for",
    target=Target("megatron.training.training", "evaluate", ("forward_step_func",)),
    wrap=_wrap,
)

"""Model and optimizer setup: check the settings again before, attach the controller after.

Megatron calls `setup_model_and_optimizer` once a training run, after its own validation and before
anything is trained; a checkpoint has been loaded when it returns.
"""

from __future__ import annotations

from typing import Any

from megatron_snip.patches.seam import Function, Seam, wrapping
from megatron_snip.patches.session import Session
from megatron_snip.patches.target import Target
from megatron_snip.patches.validation import checked_config, or_exit


def _wrap(original: Function, session: Session) -> Function:
    @wrapping(original)
    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        from megatron.training.global_vars import get_args

        session.end()  # a run before this one in the process (in-process restart)
        megatron_args = get_args()
        config = checked_config(megatron_args, session)  # a YAML namespace is validated elsewhere
        result = original(*args, **kwargs)
        if config.enabled:
            # Planning is imported by those who use it.
            from megatron_snip.patches.attach import attach

            model, optimizer = result[0], result[1]
            or_exit(lambda: attach(session, config, megatron_args, model, optimizer))
        return result

    return setup_model_and_optimizer


SEAM = Seam(
    name="setup",
    purpose="attaches to model and optimizer",
    target=Target("megatron.training.training", "setup_model_and_optimizer", ("model_type",)),
    wrap=_wrap,
)

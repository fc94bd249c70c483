"""Model and optimizer setup: check the settings before, attach the controller after.

Megatron calls `setup_model_and_optimizer` once a training run, after its own validation and before
anything is trained; a checkpoint has been loaded when it returns.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from megatron_snip.config import SnipConfig
from megatron_snip.errors import SnipError
from megatron_snip.patches.refusals import refuse_settings
from megatron_snip.patches.seam import Function, Seam, wrapping
from megatron_snip.patches.session import Session
from megatron_snip.patches.settings import snip_config
from megatron_snip.patches.target import Target

T = TypeVar("T")


def _wrap(original: Function, session: Session) -> Function:
    @wrapping(original)
    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        from megatron.training.global_vars import get_args

        session.end()  # a run before this one in the process (in-process restart)
        megatron_args = get_args()
        config = _or_exit(lambda: _checked(megatron_args, session))
        result = original(*args, **kwargs)
        if config.enabled:
            # Planning is imported by those who use it.
            from megatron_snip.patches.attach import attach

            model, optimizer = result[0], result[1]
            _or_exit(lambda: attach(session, config, megatron_args, model, optimizer))
        return result

    return setup_model_and_optimizer


def _checked(args: argparse.Namespace, session: Session) -> SnipConfig:
    config = snip_config(args, session.given)
    if config.enabled:
        refuse_settings(args)
    return config


def _or_exit(action: Callable[[], T]) -> T:
    """Run `action`; on bad input say so in one line (once a host) and end with status 2."""
    try:
        return action()
    except SnipError as error:
        if int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))) == 0:
            print(f"megatron-snip: error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None


SEAM = Seam(
    name="setup",
    purpose="checks the settings, attaches to model and optimizer",
    target=Target("megatron.training.training", "setup_model_and_optimizer", ("model_type",)),
    wrap=_wrap,
)

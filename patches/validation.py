"""Megatron's validation phase: SNIP's settings are checked right after Megatron's own.

Every rank parses and validates the same command line before any process group exists, so all of
them end alike: status 2, and one line once a host. From 0.18 on scripts and `initialize_megatron`
reach `validate_args` through its own module; before, `initialize` holds a name of its own for it.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from megatron_snip.config import SnipConfig
from megatron_snip.errors import SnipError
from megatron_snip.log import warn_once
from megatron_snip.patches.refusals import refuse_settings
from megatron_snip.patches.seam import Function, Seam, bound, wrapping
from megatron_snip.patches.session import Session
from megatron_snip.patches.settings import idle_settings, naming_flags, snip_config
from megatron_snip.patches.target import Target

logger = logging.getLogger(__name__)

T = TypeVar("T")


def speaks() -> bool:
    """Whether this rank is the one of its host that says what all of them find."""
    return int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))) == 0


def checked_config(args: argparse.Namespace, session: Session) -> SnipConfig:
    """Return the settings, or end the process with status 2 where they are no good.

    Args:
        args: Megatron's namespace, validated.
        session: which holds the flags for namespaces that were made without them.
    """

    def check() -> SnipConfig:
        config = snip_config(args, session.given)
        if config.enabled:
            refuse_settings(args)
        return config

    config = or_exit(check)
    if config.enabled and speaks():
        for text in idle_settings(config):
            warn_once(logger, text)
    return config


def or_exit(action: Callable[[], T]) -> T:
    """Run `action`; on bad input say so in one line (once a host) and end with status 2."""
    try:
        return action()
    except SnipError as error:
        if speaks():
            text = naming_flags(str(error))
            print(f"megatron-snip: error: {text}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None


def _wrap(original: Function, session: Session) -> Function:
    @wrapping(original)
    def validate_args(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        checked_config(bound(original, args, kwargs).arguments["args"], session)
        return result

    return validate_args


SEAM = Seam(
    name="validation",
    purpose="checks the settings",
    target=Target("megatron.training.arguments", "validate_args", ("args",)),
    wrap=_wrap,
)

INITIALIZE_SEAM = Seam(
    name="validation-initialize",
    purpose="checks the settings, where initialize has a name of its own for it",
    target=Target(
        "megatron.training.initialize", "validate_args", ("args",), versions=">=0.16,<0.18"
    ),
    wrap=_wrap,
    optional=True,
)

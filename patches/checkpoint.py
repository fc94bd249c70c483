"""SNIP's state in Megatron's checkpoints, whichever training loop writes them.

The formats torch_dist and torch carry it as the plain dict `snip`: in the common state that rank 0
writes, or in each rank's file. It is the same on all ranks and holds built-in types only, so it is
read back with `weights_only=True`. Megatron's other formats are for FSDP. They do not carry
it, and a resumed job starts without it.
"""

import logging
from typing import Any

from megatron_snip.log import log_failure
from megatron_snip.patches.registry import Call, Session

logger = logging.getLogger(__name__)

KEY = "snip"
"""Of the checkpoint's state dict."""

CARRYING_FORMATS = ("torch_dist", "torch")
"""Checkpoint formats that carry a key of ours from save to load."""


def save_state(call: Call, session: Session, ckpt_format: str) -> Any:
    """Run a call of `generate_state_dict` and add SNIP's state; a failure costs no checkpoint.

    Without a controller it is what was loaded, so that converting a checkpoint loses nothing.
    """
    result = call.run()
    iteration = call.arguments.get("iteration")
    # Loading asks for a template without an iteration; that must not name what may be absent.
    if iteration is None or ckpt_format not in CARRYING_FORMATS:
        return result
    state = session.loaded_state
    if session.controller is not None:
        try:
            state = session.controller.state(int(iteration)).to_dict()
        except Exception as error:
            state = None
            line = log_failure(logger, "saving SNIP's state", error)
            logger.warning("checkpoint of iteration %d has no SNIP state: %s", iteration, line)
    if state is not None:
        result[KEY] = state
    return result


def load_state(call: Call, session: Session, is_new_run: bool) -> Any:
    """Run a call of `_load_base_checkpoint` and take SNIP's state from what it has read.

    Megatron reads the common state up to three times (arguments, format, contents); only the last
    reading has `rank0=False`. A release, or weights for fine-tuning, start a new training run:
    their plan is ignored.
    """
    result = call.run()
    if not call.arguments.get("rank0", False):
        state_dict, _, release = result[:3]
        session.loaded_state = None
        if state_dict and not release and not is_new_run:
            session.loaded_state = state_dict.get(KEY)
    return result

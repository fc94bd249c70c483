"""SNIP's state in Megatron's checkpoints, whichever training loop writes them.

The formats torch_dist and torch carry it as the plain dict `snip`: in the common state that rank 0
writes, or in each rank's file. It is the same on all ranks, and holds built-in types only, so it is
read back with `weights_only=True`.

The formats of FSDP, torch_dcp and fsdp_dtensor, take dicts apart, lose empty ones, and read only
what Megatron asks for. They carry the state as one JSON text, which is read on its own.
"""

import json
import logging
from pathlib import Path
from typing import Any

from megatron_snip.log import log_failure
from megatron_snip.patches.registry import Call, Session

logger = logging.getLogger(__name__)

KEY = "snip"
"""Of the checkpoint's state dict."""

CARRYING_FORMATS = ("torch_dist", "torch")
"""Checkpoint formats that carry a key of ours from save to load."""

FSDP_FORMATS = ("torch_dcp", "fsdp_dtensor")
"""Checkpoint formats that PyTorch's distributed checkpointing writes directly."""


def save_state(call: Call, session: Session, ckpt_format: str) -> Any:
    """Run a call of `generate_state_dict` and add SNIP's state; a failure costs no checkpoint.

    Without a controller it is what was loaded, so that converting a checkpoint loses nothing.
    """
    result = call.run()
    iteration = call.arguments.get("iteration")
    # Loading asks for a template, without an iteration or before there is a controller; that must
    # not name what may be absent.
    if iteration is None or ckpt_format not in (*CARRYING_FORMATS, *FSDP_FORMATS):
        return result
    try:
        state = session.loaded_state
        if session.controller is not None:
            state = session.controller.state(int(iteration)).to_dict()
        if state is not None:
            result[KEY] = json.dumps(state) if ckpt_format in FSDP_FORMATS else state
    except Exception as error:
        line = log_failure(logger, "saving SNIP's state", error)
        logger.warning("checkpoint of iteration %d has no SNIP state: %s", iteration, line)
    return result


def load_state(call: Call, session: Session, is_new_run: bool, ckpt_format: str) -> Any:
    """Run a call of `_load_base_checkpoint` and take SNIP's state from what it has read.

    Megatron reads the common state up to three times (arguments, format, contents); only the last
    reading has `rank0=False`. A release, or weights for fine-tuning, start a new training run:
    their plan is ignored.
    """
    result = call.run()
    if not call.arguments.get("rank0", False):
        state_dict, checkpoint, release = result[:3]
        session.loaded_state = None
        if state_dict and not release and not is_new_run:
            if ckpt_format in FSDP_FORMATS:
                session.loaded_state = read_fsdp_state(checkpoint)
            else:
                session.loaded_state = state_dict.get(KEY)
    return result


def read_fsdp_state(checkpoint: str | Path) -> Any:
    """All ranks: return SNIP's state in a checkpoint of FSDP, or None if it has none."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import load

    found: dict[str, Any] = {KEY: "null"}
    planner = DefaultLoadPlanner(allow_partial_load=True)  # leaves what the checkpoint lacks
    load(found, checkpoint_id=checkpoint, planner=planner)
    return json.loads(found[KEY])

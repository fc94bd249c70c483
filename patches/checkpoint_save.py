"""Saving: SNIP's state travels in Megatron's checkpoint, as the plain dict `snip`.

torch_dist keeps it in the common state that rank 0 writes, torch in each rank's file. It is the
same on all ranks and holds built-in types only, so it is read back with `weights_only=True`. Other
formats load a fixed set of keys; for them there is a sidecar file (checkpoint_sidecar.py).
"""

from __future__ import annotations

import logging
from typing import Any

from megatron_snip.patches.seam import Function, Seam, bound, wrapping
from megatron_snip.patches.session import Session
from megatron_snip.patches.target import Target

logger = logging.getLogger(__name__)

KEY = "snip"
"""Of the checkpoint's state dict."""

CARRYING_FORMATS = ("torch_dist", "torch")
"""Checkpoint formats that carry a key of ours from save to load."""


def state_to_save(session: Session, iteration: int) -> dict[str, Any] | None:
    """Return what a checkpoint after `iteration` steps keeps, or None.

    Without a controller it is what was loaded: converting a checkpoint's format loses nothing. The
    checkpoint is written even where there is no saying what, with a warning.
    """
    if session.controller is None:
        return session.loaded
    try:
        return session.controller.state(iteration).to_dict()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        logger.warning("checkpoint of iteration %d without SNIP's state: %s", iteration, text)
        return None


def _wrap(original: Function, session: Session) -> Function:
    @wrapping(original)
    def generate_state_dict(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        call = bound(original, args, kwargs).arguments
        iteration = call.get("iteration")
        # Loading asks for a template without an iteration; that must not name what may be absent.
        if iteration is not None and call["args"].ckpt_format in CARRYING_FORMATS:
            state = state_to_save(session, int(iteration))
            if state is not None:
                result[KEY] = state
        return result

    return generate_state_dict


SEAM = Seam(
    name="checkpoint-save",
    purpose="puts SNIP's state into checkpoints",
    target=Target("megatron.training.checkpointing", "generate_state_dict", ("args", "iteration")),
    wrap=_wrap,
)

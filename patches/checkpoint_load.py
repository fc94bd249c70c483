"""Loading: take SNIP's state from the checkpoint that Megatron reads.

Megatron reads a checkpoint's common state up to three times (arguments, format, contents); only
the last, with `rank0=False`, belongs to the run. A release, or weights for fine-tuning, start a new
run: their plan is ignored.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from megatron_snip.patches.checkpoint_save import KEY
from megatron_snip.patches.checkpoint_sidecar import read_sidecar
from megatron_snip.patches.seam import Function, Seam, bound, wrapping
from megatron_snip.patches.session import Session
from megatron_snip.patches.target import Target

logger = logging.getLogger(__name__)


def _wrap(original: Function, session: Session) -> Function:
    @wrapping(original)
    def load_base_checkpoint(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        call = bound(original, args, kwargs).arguments
        if not call.get("rank0", False):
            state_dict, name, release = result[:3]
            new_run = release or getattr(call["args"], "finetune", False)
            session.loaded = None if new_run else _state(state_dict, name)
        return result

    return load_base_checkpoint


def _state(state_dict: Any, name: Any) -> dict[str, Any] | None:
    """Return SNIP's state in a loaded checkpoint, or None."""
    if not state_dict:
        return None
    found: dict[str, Any] | None = state_dict.get(KEY)
    return read_sidecar(Path(str(name))) if found is None else found


SEAM = Seam(
    name="checkpoint-load",
    purpose="takes SNIP's state from checkpoints",
    target=Target("megatron.training.checkpointing", "_load_base_checkpoint", ("args", "rank0")),
    wrap=_wrap,
)

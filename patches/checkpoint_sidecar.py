"""The sidecar: SNIP's state as a JSON file in the checkpoint's directory.

For checkpoint formats that load a fixed set of keys and would lose ours. Rank 0 writes it whole,
after Megatron has saved.
"""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

from megatron_snip.errors import UsageError
from megatron_snip.files import read_json, write_atomic
from megatron_snip.patches.checkpoint_save import CARRYING_FORMATS, state_to_save
from megatron_snip.patches.seam import Function, Seam, bound, wrapping
from megatron_snip.patches.session import Session
from megatron_snip.patches.target import Target

logger = logging.getLogger(__name__)

FILE = "snip_state.json"


def read_sidecar(directory: Path) -> dict[str, Any] | None:
    """Return the state beside a checkpoint, or None if there is no such file.

    Raises:
        UsageError: if there is one and it is not JSON.
    """
    path = directory / FILE
    if not path.is_file():
        return None
    value = read_json(path, "SNIP state file")
    if not isinstance(value, dict):
        raise UsageError(f"SNIP state file '{path}' must hold a JSON object")
    return value


def write_sidecar(directory: Path, state: dict[str, Any]) -> None:
    """Write the state beside a checkpoint.

    Raises:
        OSError: if it cannot be written.
    """
    write_atomic(directory / FILE, json.dumps(_strict(state), allow_nan=False) + "\n")


def _strict(value: Any) -> Any:
    """Return `value` with null for what strict JSON has no word for."""
    if isinstance(value, dict):
        return {name: _strict(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _wrap(original: Function, session: Session) -> Function:
    @wrapping(original)
    def save_checkpoint_and_time(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        call = bound(original, args, kwargs).arguments
        if not call.get("non_persistent_ckpt", False):
            _write(session, int(call["iteration"]))
        return result

    return save_checkpoint_and_time


def _write(session: Session, iteration: int) -> None:
    """Rank 0: write the sidecar where the checkpoint's format needs one."""
    from megatron.training.checkpointing import get_checkpoint_name
    from megatron.training.global_vars import get_args

    args = get_args()
    if args.rank != 0 or args.ckpt_format in CARRYING_FORMATS:
        return
    state = state_to_save(session, iteration)
    if state is None:
        return
    directory = Path(get_checkpoint_name(args.save, iteration, return_base_dir=True))
    try:
        write_sidecar(directory, state)
    except OSError as error:  # the checkpoint itself is good
        logger.warning("checkpoint of iteration %d without SNIP's state: %s", iteration, error)


SEAM = Seam(
    name="checkpoint-sidecar",
    purpose="keeps SNIP's state beside checkpoints that cannot carry it",
    target=Target("megatron.training.training", "save_checkpoint_and_time", ("iteration",)),
    wrap=_wrap,
)

"""SNIP's state in Megatron's checkpoints.

The formats torch_dist and torch carry it as the plain dict `snip`: in the common state that rank 0
writes, or in each rank's file. It is the same on all ranks and holds built-in types only, so it is
read back with `weights_only=True`. Other formats load a fixed set of keys. For them rank 0 writes a
JSON file (the sidecar) into the checkpoint's directory, after Megatron has saved.
"""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

from megatron_snip.errors import UsageError
from megatron_snip.files import read_json, write_atomic
from megatron_snip.patches.registry import Call, Session, patch

logger = logging.getLogger(__name__)

KEY = "snip"
"""Of the checkpoint's state dict."""

CARRYING_FORMATS = ("torch_dist", "torch")
"""Checkpoint formats that carry a key of ours from save to load."""

SIDECAR = "snip_state.json"


@patch(
    "checkpoint-save",
    "megatron.training.checkpointing",
    "generate_state_dict",
    needs=("args", "iteration"),
    purpose="puts SNIP's state into checkpoints",
)
def save(call: Call, session: Session) -> Any:
    """Add SNIP's state to the state dict."""
    result = call.run()
    iteration = call.arguments.get("iteration")
    # Loading asks for a template without an iteration; that must not name what may be absent.
    if iteration is not None and call.arguments["args"].ckpt_format in CARRYING_FORMATS:
        state = _state_to_save(session, int(iteration))
        if state is not None:
            result[KEY] = state
    return result


@patch(
    "checkpoint-sidecar",
    "megatron.training.training",
    "save_checkpoint_and_time",
    needs=("iteration",),
    purpose="writes SNIP's state beside checkpoints that cannot carry it",
)
def sidecar(call: Call, session: Session) -> Any:
    """Rank 0: write the sidecar where the checkpoint's format needs one."""
    result = call.run()
    if call.arguments.get("non_persistent_ckpt", False):
        return result
    from megatron.training.checkpointing import get_checkpoint_name
    from megatron.training.global_vars import get_args

    args, iteration = get_args(), int(call.arguments["iteration"])
    if args.rank == 0 and args.ckpt_format not in CARRYING_FORMATS:
        state = _state_to_save(session, iteration)
        if state is not None:
            directory = Path(get_checkpoint_name(args.save, iteration, return_base_dir=True))
            try:
                write_sidecar(directory, state)
            except OSError as error:
                _warn_without_state(iteration, error)
    return result


@patch(
    "checkpoint-load",
    "megatron.training.checkpointing",
    "_load_base_checkpoint",
    needs=("args", "rank0"),
    purpose="takes SNIP's state from checkpoints",
)
def load(call: Call, session: Session) -> Any:
    """Take SNIP's state from the checkpoint that Megatron reads.

    Megatron reads the common state up to three times (arguments, format, contents); only the last
    reading has `rank0=False`. A release, or weights for fine-tuning, start a new training run:
    their plan is ignored.
    """
    result = call.run()
    if not call.arguments.get("rank0", False):
        state_dict, name, release = result[:3]
        session.loaded = None
        if state_dict and not release and not getattr(call.arguments["args"], "finetune", False):
            session.loaded = state_dict.get(KEY)
            if session.loaded is None:
                session.loaded = read_sidecar(Path(str(name)))
    return result


def read_sidecar(directory: Path) -> dict[str, Any] | None:
    """Return the state beside a checkpoint, or None if there is no such file.

    Raises:
        UsageError: if there is one and it is not a JSON object.
    """
    path = directory / SIDECAR
    if not path.is_file():
        return None
    value = read_json(path, "SNIP state file")
    if not isinstance(value, dict):
        raise UsageError(f"SNIP state file '{path}' must hold a JSON object")
    return value


def write_sidecar(directory: Path, state: dict[str, Any]) -> None:
    """Write the state beside a checkpoint, atomically; numbers that are not finite become null.

    Raises:
        OSError: if it cannot be written.
    """
    write_atomic(directory / SIDECAR, json.dumps(_finite(state), allow_nan=False) + "\n")


def _state_to_save(session: Session, iteration: int) -> dict[str, Any] | None:
    """Return SNIP's state after `iteration`, or None. A failure does not cost the checkpoint.

    Without a controller it is what was loaded, so that converting a checkpoint loses nothing.
    """
    if session.controller is None:
        return session.loaded
    try:
        return session.controller.state(iteration).to_dict()
    except Exception as error:
        _warn_without_state(iteration, error)
        return None


def _warn_without_state(iteration: int, error: Exception) -> None:
    detail = f"{type(error).__name__}: {error}"
    logger.warning("checkpoint of iteration %d has no SNIP state: %s", iteration, detail)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""SNIP's state in the checkpoints of Megatron-LM's loop."""

from typing import Any

from megatron_snip.patches.checkpoint import load_state, save_state
from megatron_snip.patches.registry import Call, Session, patch

CHECKPOINTING = "megatron.training.checkpointing"


@patch(CHECKPOINTING, "generate_state_dict", needs=("args", "iteration"))
def save(call: Call, session: Session) -> Any:
    """Add SNIP's state to the state dict."""
    return save_state(call, session, call.arguments["args"].ckpt_format)


@patch(CHECKPOINTING, "_load_base_checkpoint", needs=("args", "rank0"), returns=3)
def load(call: Call, session: Session) -> Any:
    """Take SNIP's state from the checkpoint that Megatron reads."""
    args = call.arguments["args"]
    return load_state(call, session, getattr(args, "finetune", False), args.ckpt_format)

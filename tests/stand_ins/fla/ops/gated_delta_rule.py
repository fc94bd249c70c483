"""The gated delta rule, by Megatron's own PyTorch code for deterministic runs."""

from typing import Any


def chunk_gated_delta_rule(*args: Any, **kwargs: Any) -> Any:
    """Return what Megatron's `torch_chunk_gated_delta_rule` returns."""
    from megatron.core.ssm import gated_delta_net  # it imports this module

    return gated_delta_net.torch_chunk_gated_delta_rule(*args, **kwargs)

"""What this machine and its Transformer Engine can run, as `backends.Machine`.

Transformer Engine is asked only where a model has its linears: importing it takes seconds and, on
a machine without its libraries, fails.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from megatron_snip.linears.backends import Machine

_ASKED = {
    "blockwise": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
    "nvfp4": "is_nvfp4_available",
}
"""Recipe's word -> the method of FP8GlobalStateManager that says (available, reason)."""

_PER_GEMM = (
    ("transformer_engine.common.recipe", "CustomRecipe"),
    ("transformer_engine.pytorch.quantization", "QuantizerRole"),
    ("transformer_engine.pytorch.tensor.hybrid_tensor", "HybridQuantizer"),
    ("transformer_engine.pytorch.tensor.identity_tensor", "IdentityQuantizer"),
    ("transformer_engine.pytorch.custom_recipes.quantizer_factories", "nvfp4_factory"),
)
"""What our quantizer factories need of Transformer Engine."""


def this_machine(with_te: bool) -> Machine:
    """Return what decides how linears run here.

    Args:
        with_te: ask Transformer Engine as well (it is imported for that).
    """
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if not with_te:
        return Machine(capability)
    try:
        te = importlib.import_module("transformer_engine")
        manager = importlib.import_module("transformer_engine.pytorch.fp8").FP8GlobalStateManager
    except Exception:  # not installed, or a library of its own is missing
        return Machine(capability)
    unavailable = {} if capability is None else _unavailable(manager)
    return Machine(capability, str(te.__version__), has_per_gemm(), unavailable)


def has_per_gemm() -> bool:
    """Whether the installed Transformer Engine lets every GEMM choose its quantizers."""
    for module, name in _PER_GEMM:
        try:
            getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            return False
    return True


def _unavailable(manager: Any) -> dict[str, str]:
    """Return recipes that Transformer Engine cannot run here, with its reasons."""
    found = {}
    for word, method in _ASKED.items():
        if not hasattr(manager, method):
            found[word] = "this Transformer Engine does not know the recipe"
            continue
        available, reason = getattr(manager, method)()
        if not available:
            found[word] = str(reason)
    return found

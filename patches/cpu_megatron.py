"""What Megatron-Core takes from Transformer Engine or Apex and has no fallback for.

A norm under sequence parallelism, the MoE router's GEMM, optimizer state on load, and the compiled
dataset helpers of a wheel. Part of the CPU patch (cpu.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_snip.patches import torch_adam
from megatron_snip.patches.cpu_device import constant
from megatron_snip.patches.undo import Undo


def _norm_under_sequence_parallel(original: Callable[..., Any]) -> Callable[..., Any]:
    """`WrappedTorchNorm.__new__` that also serves sequence parallelism.

    Each TP rank normalizes its own tokens, so the gradients of the norm's parameters are partial
    sums; the mark makes `finalize_model_grads` all-reduce them over TP.
    """

    def __new__(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        if not config.sequence_parallel:
            return original(cls, config, *args, **kwargs)
        plain = copy.copy(config)  # Megatron's other checks still see the user's settings
        plain.sequence_parallel = False
        norm = original(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    return __new__


def _helpers_are_built() -> bool:
    """Whether the wheel brought the dataset helpers compiled, and no way to compile them."""
    import megatron.core.datasets as datasets

    folder = Path(datasets.__path__[0])
    return any(folder.glob("helpers_cpp*.so")) and not (folder / "Makefile").exists()


def patch_megatron(undo: Undo) -> None:
    """Give Megatron-Core what it lacks; `undo` remembers what was there."""
    from megatron.core.datasets import utils as dataset_utils
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.tensor_parallel import random as tensor_parallel_random
    from megatron.core.transformer import torch_norm
    from megatron.core.transformer.moe import moe_utils

    for theirs, name in (
        ("_lazy_call", "_lazy_call"),
        ("_lazy_init", "_lazy_init"),
        ("device_ctx_manager", "device"),
    ):
        # Imported by value, perhaps before this patch.
        undo.set(tensor_parallel_random, theirs, getattr(torch.cuda, name))
    undo.wrap(torch_norm.WrappedTorchNorm, "__new__", _norm_under_sequence_parallel)
    if not hasattr(moe_utils, "te_general_gemm"):
        # 0.16.1 asks `te_general_gemm is not None` without defining it when TE is absent.
        undo.set(moe_utils, "te_general_gemm", None)
    for name, wrapper in torch_adam.wrappers().items():
        undo.wrap(DistributedOptimizer, name, wrapper)
    if _helpers_are_built():
        undo.set(dataset_utils, "compile_helpers", constant(None))

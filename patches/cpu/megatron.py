"""Megatron-Core on the CPU: what it takes from Transformer Engine, Apex or CUDA without a fallback.

A norm under sequence parallelism, the MoE router's GEMM, optimizer state on load, the compiled
dataset helpers, and pipeline outputs that stay alive until gloo has sent them.
"""

import argparse
import copy
import functools
import os
from collections.abc import Callable, Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch

from megatron_snip.patches.cpu import torch_adam
from megatron_snip.patches.cpu.device import constant
from megatron_snip.patches.registry import Call, Session, patch

CPU_DEFAULTS = {
    "distributed_backend": "gloo",
    "transformer_impl": "local",
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "cross_entropy_loss_fusion": False,
    "no_persist_layer_norm": True,
    "persist_layer_norm": False,
}
"""Settings that a run without a GPU needs, by namespace attribute."""


def set_cpu_defaults(parser: argparse.ArgumentParser) -> None:
    """Make `CPU_DEFAULTS` the defaults of Megatron's parser, where a release has the setting.

    `--cpu` alone then runs a script that was written for GPUs. A flag on the command line wins.
    """
    known = {action.dest for action in parser._actions}
    parser.set_defaults(**{k: v for k, v in CPU_DEFAULTS.items() if k in known})


@patch("megatron.legacy.fused_kernels", "load", when="--cpu", optional=True)
def fused_kernels(call: Call, session: Session) -> None:
    """Skip the kernels that 0.16 compiles at every start: they need nvcc, and CPU runs not them."""


def megatron_replacements() -> Iterator[tuple[Any, str, Any]]:
    """Return (owner, attribute, new value) for Megatron-Core; `torch.cuda` is replaced before."""
    from megatron.core.datasets import utils as dataset_utils
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.distributed.fsdp.src.megatron_fsdp import (
        param_and_grad_buffer as fsdp_param_and_grad_buffer,
    )
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import random as tensor_parallel_random
    from megatron.core.transformer import multi_token_prediction
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    # Imported by value, perhaps before this patch.
    yield tensor_parallel_random, "_lazy_call", torch.cuda._lazy_call
    yield tensor_parallel_random, "_lazy_init", torch.cuda._lazy_init
    yield tensor_parallel_random, "device_ctx_manager", torch.cuda.device
    yield WrappedTorchNorm, "__new__", _norm_under_sequence_parallel(WrappedTorchNorm.__new__)
    yield schedules, "get_model_config", _without_deallocation(schedules.get_model_config)
    for importer in (param_and_grad_buffer, fsdp_param_and_grad_buffer):
        yield importer, "_coalescing_manager", vars(torch.distributed)["_coalescing_manager"]
    if not hasattr(moe_utils, "te_general_gemm"):
        # 0.16.1 asks `te_general_gemm is not None` without defining it when TE is absent.
        yield moe_utils, "te_general_gemm", None
    if hasattr(multi_token_prediction, "is_inference_column_parallel_linear"):
        # 0.20 asks it of a class that does not exist when TE is absent.
        yield multi_token_prediction, "is_inference_column_parallel_linear", constant(False)
    yield from torch_adam.replacements()
    compile_helpers = dataset_utils.compile_helpers
    if _helpers_are_built():
        yield dataset_utils, "compile_helpers", constant(None)
    else:
        yield dataset_utils, "compile_helpers", _named_for_this_python(compile_helpers)


def _without_deallocation(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function with which a pipeline schedule reads the model's config.

    Megatron frees a stage's output right after its asynchronous send. On CUDA the stream orders
    the two. gloo reads the memory later, so losses would differ between runs or become NaN.
    """

    @functools.wraps(original)
    def get_model_config(*args: Any, **kwargs: Any) -> Any:
        config = original(*args, **kwargs)
        config.deallocate_pipeline_outputs = False
        return config

    return get_model_config


def _norm_under_sequence_parallel(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `WrappedTorchNorm.__new__` to allow sequence parallelism.

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
    """Whether the dataset helpers are compiled for this Python, in a wheel or by `make` before."""
    import megatron.core.datasets as datasets

    folder = Path(datasets.__path__[0])
    return any((folder / f"helpers_cpp{suffix}").exists() for suffix in EXTENSION_SUFFIXES)


def _named_for_this_python(original: Callable[[], None]) -> Callable[[], None]:
    """Wrap the function that compiles the dataset helpers with `make`.

    Megatron's Makefile names them after the first `python3-config` on PATH. In a virtual
    environment this is that of another Python, which may have another version: pyenv's for example.
    """

    @functools.wraps(original)
    def compile_helpers() -> None:
        before = os.environ.get("MAKEFLAGS")
        os.environ["MAKEFLAGS"] = f"{before or ''} LIBEXT={EXTENSION_SUFFIXES[0]}".strip()
        try:
            original()
        finally:
            if before is None:
                del os.environ["MAKEFLAGS"]
            else:
                os.environ["MAKEFLAGS"] = before

    return compile_helpers

"""Run Megatron-Core on a machine without a GPU: CPU tensors, gloo collectives.

Megatron-Core names the CUDA device everywhere. `install` answers these calls from the CPU:

* tensors.py moves tensors for a CUDA device to the CPU and computes BF16 products in FP32;
* device.py gives `torch.cuda`'s functions (streams, events, RNG, memory) CPU answers;
* graphs.py records what a CUDA graph captures, and replays it;
* collectives.py gives gloo what Megatron-Core expects of NCCL;
* megatron.py and torch_adam.py replace what Megatron-Core takes from CUDA packages.

Nothing is replaced where CUDA is available. `uninstall` puts back the very objects it found,
except where another replacement was made since.
Such a run shows Megatron's control flow, collectives and arithmetic. It shows nothing about CUDA
kernels, streams or speed.
"""

import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data.dataloader import _BaseDataLoaderIter

from megatron_snip.patches.cpu.collectives import one_by_one, plain_splits, uneven_all_gather
from megatron_snip.patches.cpu.device import constant, cuda_answers, local_ranks
from megatron_snip.patches.cpu.megatron import megatron_replacements
from megatron_snip.patches.cpu.tensors import (
    CudaOnCpu,
    active_modes,
    in_backward,
    load_on_cpu,
    wrapper_on_cpu,
)
from megatron_snip.patches.registry import replace_attribute

_MODE = CudaOnCpu()
_installed: ExitStack | None = None
"""Undoes the installation of this process."""


def is_installed() -> bool:
    """Return whether the CPU answers `torch.cuda` in this process."""
    return _installed is not None


def install(claim_cuda: bool = False, capability: tuple[int, int] = (8, 0)) -> bool:
    """Redirect CUDA calls to the CPU in this process; a second call changes nothing.

    Call it in the thread that trains. Megatron may have been imported before or not.

    Args:
        claim_cuda: also answer that CUDA is available, with one device for each local rank.
            Scripts of Megatron-LM assert it; code that chooses kernels by it must not see it.
        capability: the compute capability that is reported.

    Returns:
        Whether the CPU answers: False where CUDA is really available.
    """
    global _installed
    if _installed is not None:
        return True
    if torch.cuda.is_available():
        return False
    # Megatron's fused helpers are torch.compile'd at import, and without a GPU that needs a C++
    # compiler. Those of a Megatron that was imported before are switched off here.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    with ExitStack() as undo:  # an error undoes what was replaced before it
        found = _torch_replacements(claim_cuda, capability)
        for owner, name, value in chain(found, megatron_replacements()):
            undo.callback(replace_attribute(owner, name, value))
        undo.callback(_set_compile_off, _set_compile_off(True))
        tracker = logging.getLogger("megatron.core.tensor_parallel.random")
        tracker.addFilter(_is_news)
        undo.callback(tracker.removeFilter, _is_news)
        undo.enter_context(_MODE)
        _installed = undo.pop_all()
    return True


def uninstall() -> None:
    """Put back all that `install` replaced; without an installation nothing happens.

    Raises:
        RuntimeError: if called inside a torch function mode that was entered after `install`.
    """
    global _installed
    if _installed is None:
        return
    if active_modes()[-1:] != [_MODE]:
        raise RuntimeError("leave the torch function modes entered after cpu.install() first")
    _installed.close()
    _installed = None


def _is_news(record: logging.LogRecord) -> bool:
    # Megatron's tracker warns that the CPU's state moved; here the CPU's and CUDA's are one.
    return "CPU RNG state changed" not in record.getMessage()


def _set_compile_off(off: bool) -> bool:
    """Switch torch.compile off or on where it is loaded; return what it was."""
    if "torch._dynamo" not in sys.modules:
        return off
    settings = torch._dynamo.config
    before = settings.disable
    settings.disable = off
    return before


def _torch_replacements(
    claim_cuda: bool, capability: tuple[int, int]
) -> Iterator[tuple[Any, str, Any]]:
    engine, run = torch.autograd, "_engine_run_backward"
    yield engine, run, in_backward(_MODE, getattr(engine, run))
    for name, answer in cuda_answers(capability).items():
        yield torch.cuda, name, answer
    yield torch.cuda.random, "get_rng_state", torch.cuda.get_rng_state
    yield torch.cuda.random, "set_rng_state", torch.cuda.set_rng_state
    yield torch._C, "_graph_pool_handle", torch.cuda.graph_pool_handle  # Transformer Engine's
    for name in ("range_push", "range_pop"):
        yield torch.cuda.nvtx, name, constant(None)
    yield torch, "compile", _eager
    yield torch, "load", load_on_cpu(torch.load)
    yield torch.Tensor, "record_stream", constant(None)
    make = wrapper_on_cpu(torch.Tensor._make_wrapper_subclass)
    yield torch.Tensor, "_make_wrapper_subclass", staticmethod(make)
    if claim_cuda:
        yield torch.cuda, "is_available", constant(True)
        yield torch.cuda, "is_initialized", constant(True)
        yield torch.cuda, "device_count", local_ranks
    # A CUDA build of torch would ask the driver at every optimizer step.
    yield torch.accelerator, "is_available", constant(False)
    yield torch.accelerator, "current_accelerator", constant(None)
    yield _BaseDataLoaderIter, "__init__", _without_draws(_BaseDataLoaderIter.__init__)
    yield dist, "all_to_all_single", plain_splits(dist.all_to_all_single)
    yield dist, "all_gather", uneven_all_gather(dist.all_gather)
    yield dist, "_coalescing_manager", one_by_one(distributed_c10d._coalescing_manager)
    yield DeviceMesh, "__init__", _mesh_of_cpus(DeviceMesh.__init__)


def _eager(model: Any = None, **_options: Any) -> Any:
    """Answer torch.compile with the function itself: Dynamo alone takes seconds to import."""
    return model if model is not None else _eager


def _without_draws(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the start of a data loader, which draws a seed for its workers.

    On a GPU that is another generator than dropout's. Here a resumed run, which starts its loaders
    after it has loaded the generator's state, would have other dropout masks than the run before.
    """

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        state = torch.get_rng_state()
        try:
            original(self, *args, **kwargs)
        finally:
            torch.set_rng_state(state)

    return __init__


def _mesh_of_cpus(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the construction of a device mesh, whose device type FSDP names."""

    @functools.wraps(original)
    def __init__(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        original(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    return __init__

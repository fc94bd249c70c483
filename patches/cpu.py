"""Run Megatron-Core on a machine without a GPU: CPU tensors, gloo collectives.

Megatron-Core names the CUDA device everywhere (`device="cuda"`, `torch.cuda.current_device()`,
streams, RNG states, `"torch.cuda.FloatTensor"`). This patch answers those calls from the CPU:

* a `TorchFunctionMode` rewrites the device of factory functions and `.to`, makes `.cuda()` the
  identity, and gives `Tensor.type()` the names that Megatron compares with;
* `torch.cuda`'s functions (device, streams, events, RNG, memory, nvtx) get CPU answers. The CUDA
  generator *is* the CPU generator, so that Megatron's RNG tracker forks a real stream;
* gloo gets what it lacks and NCCL has: uneven all-gather and reduce-scatter;
* what Megatron-Core takes from Transformer Engine or Apex and has no fallback for: a norm under
  sequence parallelism, the MoE router's GEMM, optimizer state on load.

BF16 products are computed as FP32 products rounded once to BF16, which is what a GPU's tensor
cores return up to the order of summation. CPUs without BF16 units take 8 to 40 times longer for
the native product.

Nothing is patched where CUDA is available, and `uninstall` puts back the very objects it found.
What a run on this patch shows is Megatron's control flow, collectives and arithmetic; it shows
nothing about CUDA kernels, streams or speed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist

from megatron_snip.patches.cpu_collectives import (
    plain_splits,
    uneven_all_gather,
    uneven_reduce_scatter,
)
from megatron_snip.patches.cpu_device import TrackerNoise, constant, cuda_answers, local_ranks
from megatron_snip.patches.cpu_megatron import patch_megatron
from megatron_snip.patches.cpu_tensors import CudaOnCpu, active_modes, in_backward
from megatron_snip.patches.undo import Undo


class _Installed:
    """The one installation of a process."""

    def __init__(self) -> None:
        self.undo = Undo()
        self.mode = CudaOnCpu()
        self.noise = TrackerNoise()
        self.compile_was_off = False


_installed: _Installed | None = None
_TRACKER_LOGGER = "megatron.core.tensor_parallel.random"


def is_installed() -> bool:
    """Whether `torch.cuda` is answered by the CPU in this process."""
    return _installed is not None


def install(claim_cuda: bool = False, capability: tuple[int, int] = (8, 0)) -> bool:
    """Redirect CUDA calls to the CPU in this process; a second call changes nothing.

    Call it in the thread that trains. Megatron may have been imported before or not.

    Args:
        claim_cuda: also answer that CUDA is available, with one device a local rank. Scripts of
            Megatron-LM assert it; code that picks kernels by it must not see it.
        capability: the compute capability that is reported.

    Returns:
        Whether the patch is in place: False where CUDA is really available.
    """
    global _installed
    if _installed is not None:
        return True
    if torch.cuda.is_available():
        return False
    # Megatron's fused helpers are torch.compile'd at import, and without a GPU that needs a C++
    # compiler. The variable is read when they are decorated, the setting when they are called.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    state = _Installed()
    _patch_torch(state, claim_cuda, capability)
    _patch_gloo(state.undo)
    try:
        patch_megatron(state.undo)
        state.compile_was_off = _set_compile_off(True)
    except BaseException:
        state.undo.restore()
        raise
    logging.getLogger(_TRACKER_LOGGER).addFilter(state.noise)
    state.mode.__enter__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    _installed = state
    return True


def uninstall() -> None:
    """Put back all that `install` replaced; without an installation nothing happens.

    Raises:
        RuntimeError: if called inside a torch function mode that was entered after `install`.
    """
    global _installed
    if _installed is None:
        return
    if active_modes()[-1:] != [_installed.mode]:
        raise RuntimeError("leave the torch function modes entered after cpu.install() first")
    _installed.mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    logging.getLogger(_TRACKER_LOGGER).removeFilter(_installed.noise)
    _set_compile_off(_installed.compile_was_off)
    _installed.undo.restore()
    _installed = None


@contextlib.contextmanager
def installed(claim_cuda: bool = False) -> Iterator[bool]:
    """Install for the length of a `with` block, unless it was installed before."""
    before = is_installed()
    try:
        yield install(claim_cuda)
    finally:
        if not before:
            uninstall()


def _set_compile_off(off: bool) -> bool:
    """Switch torch.compile off or on where it is loaded; return what it was."""
    if "torch._dynamo" not in sys.modules:
        return off
    settings = torch._dynamo.config
    before, settings.disable = settings.disable, off
    return before


def _patch_torch(state: _Installed, claim_cuda: bool, capability: tuple[int, int]) -> None:
    undo = state.undo
    undo.wrap(torch.autograd, "_engine_run_backward", in_backward(state.mode))
    for name, answer in cuda_answers(capability).items():
        undo.set(torch.cuda, name, answer)
    undo.set(torch.cuda.random, "get_rng_state", torch.cuda.get_rng_state)
    undo.set(torch.cuda.random, "set_rng_state", torch.cuda.set_rng_state)
    for name in ("range_push", "range_pop"):
        undo.set(torch.cuda.nvtx, name, constant(None))
    if claim_cuda:
        undo.set(torch.cuda, "is_available", constant(True))
        undo.set(torch.cuda, "is_initialized", constant(True))
        undo.set(torch.cuda, "device_count", local_ranks)
    # A CUDA build of torch would ask the driver at every optimizer step.
    undo.set(torch.accelerator, "is_available", constant(False))
    undo.set(torch.accelerator, "current_accelerator", constant(None))


def _patch_gloo(undo: Undo) -> None:
    undo.wrap(dist, "all_to_all_single", plain_splits)
    undo.wrap(dist, "all_gather", uneven_all_gather)
    undo.wrap(dist, "reduce_scatter", uneven_reduce_scatter)

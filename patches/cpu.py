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
import copy
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from megatron_snip.patches import torch_adam

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")
GIB = 1 << 30

_PRODUCTS = frozenset(
    {
        torch.matmul,
        torch.mm,
        torch.bmm,
        torch.addmm,
        torch.baddbmm,
        torch.nn.functional.linear,
        torch.Tensor.matmul,
        torch.Tensor.mm,
        torch.Tensor.bmm,
        torch.Tensor.addmm,
        torch.Tensor.baddbmm,
        torch.Tensor.__matmul__,
        torch.Tensor.__rmatmul__,
    }
)
"""Functions whose BF16 form runs in FP32 and is rounded once."""


# ---- tensors --------------------------------------------------------------------------------


class CudaOnCpu(TorchFunctionMode):
    """Rewrites torch calls that name a CUDA device, and BF16 products (see the module's text).

    A function mode belongs to the thread that entered it; autograd runs a CPU graph's backward
    in the thread that calls it, so one thread is all that training needs. But torch leaves a mode
    while it handles a call, and `backward` is such a call: `_in_backward` enters it again.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func` with its CUDA words replaced."""
        kwargs = kwargs or {}
        if func in _PRODUCTS:
            return _product(func, args, kwargs)
        rewrite = _REWRITES.get(func)
        if rewrite is not None:
            return rewrite(func, args, kwargs)
        if "device" in kwargs or "pin_memory" in kwargs:
            kwargs = dict(kwargs)
            if "device" in kwargs:
                kwargs["device"] = _on_cpu(kwargs["device"])
            kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


def _in_backward(mode: CudaOnCpu) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a wrapper that runs autograd's engine, and so Python's backwards, under the mode."""

    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def run_backward(*args: Any, **kwargs: Any) -> Any:
            if mode in _active_modes():
                return original(*args, **kwargs)
            with mode:
                return original(*args, **kwargs)

        return run_backward

    return wrapper


def _active_modes() -> list[Any]:
    modes: list[Any] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return modes


def _on_cpu(device: Any) -> Any:
    """Return the CPU for a CUDA device in any spelling, and anything else as it is."""
    if isinstance(device, bool) or device is None:
        return device
    if isinstance(device, int):
        return CPU
    named = isinstance(device, str) and device.partition(":")[0] == "cuda"
    typed = isinstance(device, torch.device) and device.type == "cuda"
    return CPU if named or typed else device


def _identity(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0]


def _nothing(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    return None


def _to(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # An int as first positional argument of `to` is a CUDA device index.
    args = (args[0], *(_on_cpu(arg) for arg in args[1:2]), *args[2:])
    return func(*args, **{k: _on_cpu(v) if k == "device" else v for k, v in kwargs.items()})


def _type(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Megatron's optimizers sort parameters by comparing with "torch.cuda.BFloat16Tensor" etc.
    if len(args) == 1 and not kwargs:
        return str(func(*args)).replace("torch.", "torch.cuda.", 1)
    if len(args) > 1 and isinstance(args[1], str):
        args = (args[0], args[1].replace("torch.cuda.", "torch.", 1), *args[2:])
    return func(*args, **kwargs)


_REWRITES: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.Tensor.cuda: _identity,
    torch.Tensor.pin_memory: _identity,
    torch.Tensor.record_stream: _nothing,
    torch.Tensor.to: _to,
    torch.Tensor.type: _type,
}


def _product(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute a product of BF16 tensors in FP32 and round the result once."""
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
    if not tensors or any(t.dtype != torch.bfloat16 for t in tensors):
        return func(*args, **kwargs)
    out = kwargs.get("out")
    wide = [a.float() if isinstance(a, torch.Tensor) else a for a in args]
    named = {
        k: v.float() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items() if k != "out"
    }
    result = func(*wide, **named)
    return result.bfloat16() if out is None else out.copy_(result)


# ---- torch.cuda -----------------------------------------------------------------------------


class _Timeline:
    """Stands in for a CUDA stream or event: everything on the CPU has already happened."""

    cuda_stream = 0
    stream_id = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        """Nothing is pending."""

    def wait_event(self, event: Any) -> None:
        """Nothing is pending."""

    def wait(self, stream: Any = None) -> None:
        """Nothing is pending."""

    def synchronize(self) -> None:
        """Nothing is pending."""

    def record(self, stream: Any = None) -> None:
        """Nothing to remember."""

    def record_event(self, event: Any = None) -> Any:
        """Return the event, or a new one."""
        return Event() if event is None else event

    def query(self) -> bool:
        """Whether all work is done."""
        return True

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds between two events: unknown here."""
        return 0.0

    def __enter__(self) -> _Timeline:
        return self

    def __exit__(self, *exc: object) -> None:
        return None


class Stream(_Timeline):
    """`torch.cuda.Stream` on the CPU."""


class Event(_Timeline):
    """`torch.cuda.Event` on the CPU."""


class _Generators(Sequence[torch.Generator]):
    """`torch.cuda.default_generators`: the CPU's generator for every device."""

    def __getitem__(self, index: Any) -> Any:
        return torch.default_generator

    def __len__(self) -> int:
        return _local_ranks()


class _Properties:
    """What Megatron reads of `torch.cuda.get_device_properties`."""

    name = "cpu"
    gcnArchName = ""
    multi_processor_count = 1
    total_memory = 8 * GIB

    def __init__(self, capability: tuple[int, int]) -> None:
        self.major, self.minor = capability


def _local_ranks() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _constant(value: Any) -> Callable[..., Any]:
    """A new function object each time: dynamo refuses one object under two names."""
    return lambda *args, **kwargs: value


def _cuda_answers(capability: tuple[int, int]) -> dict[str, Any]:
    """Name below `torch.cuda` -> its stand-in."""
    stream = Stream()
    answers: dict[str, Any] = {
        "current_device": _constant(CPU),
        "current_stream": _constant(stream),
        "default_stream": _constant(stream),
        "is_current_stream_capturing": _constant(False),
        "default_generators": _Generators(),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "manual_seed": lambda seed: _seed(seed),
        "manual_seed_all": lambda seed: _seed(seed),
        "get_device_name": _constant("cpu"),
        "get_device_properties": _constant(_Properties(capability)),
        "get_device_capability": _constant(capability),
        "memory_stats": lambda device=None: {},
        "mem_get_info": _constant((8 * GIB, 8 * GIB)),
        "Stream": Stream,
        "Event": Event,
        "stream": lambda stream: contextlib.nullcontext(),
        "device": lambda device: contextlib.nullcontext(),
        "_lazy_call": lambda call, **kwargs: call(),
        "_lazy_init": _constant(None),
    }
    for name in ("set_device", "init", "synchronize", "empty_cache", "ipc_collect"):
        answers[name] = _constant(None)
    for name in ("reset_peak_memory_stats", "reset_max_memory_allocated"):
        answers[name] = _constant(None)
    for name in ("allocated", "reserved"):
        answers[f"memory_{name}"] = _constant(0)
        answers[f"max_memory_{name}"] = _constant(0)
    for name in ("Float", "Half", "BFloat16", "Double", "Int", "Long", "Byte", "Bool"):
        answers[f"{name}Tensor"] = getattr(torch, f"{name}Tensor")
    return answers


class _TrackerNoise(logging.Filter):
    """Drops the RNG tracker's warning that the CPU state moved: here both states are one."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is to be logged."""
        return "CPU RNG state changed" not in record.getMessage()


# ---- gloo -----------------------------------------------------------------------------------


def _plain_splits(original: Callable[..., Any]) -> Callable[..., Any]:
    """all_to_all_single that takes its split sizes as tensors, as the MoE dispatcher gives them."""

    def plain(sizes: Any) -> Any:
        return sizes.tolist() if hasattr(sizes, "tolist") else sizes

    @functools.wraps(original)
    def all_to_all_single(
        output: Any,
        input: Any,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        splits = (plain(output_split_sizes), plain(input_split_sizes))
        return original(output, input, *splits, *args, **kwargs)

    return all_to_all_single


def _uneven(tensors: Sequence[torch.Tensor]) -> bool:
    return len({tuple(t.shape) for t in tensors}) > 1


def _uneven_all_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    """all_gather whose ranks may differ in their first dimension: pad, gather, cut."""

    @functools.wraps(original)
    def all_gather(tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        if not _uneven(tensor_list):
            return original(tensor_list, tensor, group=group, async_op=async_op)
        rows = max(t.shape[0] for t in tensor_list)
        padded = tensor.new_zeros((rows, *tensor.shape[1:]))
        padded[: tensor.shape[0]] = tensor
        gathered = [torch.empty_like(padded) for _ in tensor_list]
        original(gathered, padded, group=group)
        for target, source in zip(tensor_list, gathered, strict=True):
            target.copy_(source[: target.shape[0]])
        return None

    return all_gather


def _uneven_reduce_scatter(original: Callable[..., Any]) -> Callable[..., Any]:
    """reduce_scatter whose ranks may differ in their first dimension: all-reduce and cut."""

    @functools.wraps(original)
    def reduce_scatter(
        output: Any,
        input_list: Any,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if not _uneven(input_list):
            return original(output, input_list, op=op, group=group, async_op=async_op)
        whole = torch.cat(list(input_list))
        dist.all_reduce(whole, op=op, group=group)
        rows = [t.shape[0] for t in input_list]
        output.copy_(torch.split(whole, rows)[dist.get_rank(group)])
        return None

    return reduce_scatter


# ---- Megatron-Core without Transformer Engine and Apex --------------------------------------


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


# ---- install, uninstall ---------------------------------------------------------------------

_ABSENT = object()


class _Undo:
    """Remembers every attribute it sets, with the very object that was there before."""

    def __init__(self) -> None:
        self._entries: list[tuple[Any, str, Any, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set `owner.name` and remember what was there."""
        self._entries.append((owner, name, vars(owner).get(name, _ABSENT), value))
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
        """Replace a function by `wrapper(function)`."""
        self.set(owner, name, wrapper(getattr(owner, name)))

    def restore(self) -> None:
        """Put everything back, last first; an attribute that someone else replaced stays."""
        while self._entries:
            owner, name, before, ours = self._entries.pop()
            now = vars(owner).get(name, _ABSENT)
            if now is not ours:
                logger.warning("%s.%s was replaced by someone else; left as it is", owner, name)
            elif before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


class _Installed:
    """The one installation of a process."""

    def __init__(self) -> None:
        self.undo = _Undo()
        self.mode = CudaOnCpu()
        self.noise = _TrackerNoise()
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
        _patch_megatron(state.undo)
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
    if _active_modes()[-1:] != [_installed.mode]:
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
    undo.wrap(torch.autograd, "_engine_run_backward", _in_backward(state.mode))
    for name, answer in _cuda_answers(capability).items():
        undo.set(torch.cuda, name, answer)
    undo.set(torch.cuda.random, "get_rng_state", torch.cuda.get_rng_state)
    undo.set(torch.cuda.random, "set_rng_state", torch.cuda.set_rng_state)
    for name in ("range_push", "range_pop"):
        undo.set(torch.cuda.nvtx, name, _constant(None))
    if claim_cuda:
        undo.set(torch.cuda, "is_available", _constant(True))
        undo.set(torch.cuda, "is_initialized", _constant(True))
        undo.set(torch.cuda, "device_count", _local_ranks)
    # A CUDA build of torch would ask the driver at every optimizer step.
    undo.set(torch.accelerator, "is_available", _constant(False))
    undo.set(torch.accelerator, "current_accelerator", _constant(None))


def _patch_gloo(undo: _Undo) -> None:
    undo.wrap(dist, "all_to_all_single", _plain_splits)
    undo.wrap(dist, "all_gather", _uneven_all_gather)
    undo.wrap(dist, "reduce_scatter", _uneven_reduce_scatter)


def _patch_megatron(undo: _Undo) -> None:
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
        undo.set(dataset_utils, "compile_helpers", _constant(None))

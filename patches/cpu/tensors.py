"""Tensors that Megatron wants on a CUDA device, on the CPU; BF16 products that round once.

A `TorchFunctionMode` rewrites the device of factory functions and of `.to`, makes `.cuda()` the
identity, and gives `Tensor.type()` the names that Megatron compares with. Products of BF16 tensors
are computed in FP32 and rounded once, which is what a GPU's tensor cores return up to the order of
summation. CPUs without BF16 units take 8 to 40 times longer for the native product.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

CPU = torch.device("cpu")

_PRODUCTS = frozenset(
    {
        torch.nn.functional.linear,
        torch.Tensor.__matmul__,
        torch.Tensor.__rmatmul__,
        *(getattr(torch, name) for name in ("matmul", "mm", "bmm", "addmm", "baddbmm")),
        *(getattr(torch.Tensor, name) for name in ("matmul", "mm", "bmm", "addmm", "baddbmm")),
    }
)


class CudaOnCpu(TorchFunctionMode):
    """Rewrites torch calls that name a CUDA device, and BF16 products.

    A function mode belongs to the thread that entered it; autograd runs a CPU graph's backward
    in the thread that calls it, so one thread is all that training needs. But torch leaves a mode
    while it handles a call, and `backward` is such a call: `in_backward` enters it again.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func` with the CPU in place of a CUDA device."""
        kwargs = {k: _on_cpu(v) if k == "device" else v for k, v in (kwargs or {}).items()}
        kwargs.pop("pin_memory", None)
        rewrite = _product if func in _PRODUCTS else _REWRITES.get(func)
        return func(*args, **kwargs) if rewrite is None else rewrite(func, args, kwargs)


def in_backward(mode: CudaOnCpu, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap autograd's engine so that it, and so Python's backwards, run under the mode."""

    @functools.wraps(original)
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        if mode in active_modes():
            return original(*args, **kwargs)
        with mode:
            return original(*args, **kwargs)

    return run_backward


def load_on_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `torch.load` so that a CUDA device as the place of its tensors means the CPU."""

    @functools.wraps(original)
    def load(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        return original(file, _on_cpu(map_location), *args, **kwargs)

    return load


def wrapper_on_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the making of a tensor subclass's object, which no function mode sees."""

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{k: _on_cpu(v) if k == "device" else v for k, v in kwargs.items()})

    return make


def active_modes() -> list[Any]:
    """Return the function modes that are active, outermost first."""
    modes: list[Any] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return modes


def is_cuda(device: Any) -> bool:
    """Return whether a value names a CUDA device, in any spelling."""
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def _on_cpu(device: Any) -> Any:
    """Return the CPU for a CUDA device, and anything else as it is."""
    return CPU if is_cuda(device) else device


def _to(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # An int as first positional argument of `to` is a CUDA device index.
    return func(args[0], *(_on_cpu(arg) for arg in args[1:2]), *args[2:], **kwargs)


def _type(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Megatron's optimizers sort parameters by comparing with "torch.cuda.BFloat16Tensor" etc.
    if len(args) == 1 and not kwargs:
        return str(func(*args)).replace("torch.", "torch.cuda.", 1)
    if len(args) > 1 and isinstance(args[1], str):
        args = (args[0], args[1].replace("torch.cuda.", "torch.", 1), *args[2:])
    return func(*args, **kwargs)


def _device(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the CPU for a CUDA device with an index; `cuda` alone becomes it where it is used."""
    first = args[0] if args else kwargs.get("type")
    has_index = len(args) > 1 or "index" in kwargs
    is_cuda = isinstance(first, int) or (
        isinstance(first, str) and (first.startswith("cuda:") or (first == "cuda" and has_index))
    )
    return CPU if is_cuda else func(*args, **kwargs)


_REWRITES: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.device: _device,
    torch.Tensor.cuda: lambda func, args, kwargs: args[0],
    torch.Tensor.pin_memory: lambda func, args, kwargs: args[0],
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

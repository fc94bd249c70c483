"""Which formats the GEMMs of Transformer Engine's linears really multiplied.

    probe.install()
    module.seen          # [(fprop, dgrad, wgrad), ...] per backward: ("nvfp4", "mxfp8", "bf16")
    module.num_builds    # how often its quantizers were made
    with probe.gemms() as found:    # every GEMM with the values of its operands
        ...

A forward without gradients is not in `seen`. Formats have the names of the project's recipes.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tests.te_on_cpu.extension.operands import format_of, values_of

NAMES = ("fprop", "dgrad", "wgrad")
_LAYOUTS = {(True, False): "fprop", (False, False): "dgrad", (False, True): "wgrad"}
_FORMATS = {"": "bf16", "Float8Block": "blockwise", "MXFP8": "mxfp8", "NVFP4": "nvfp4"}


@dataclass(frozen=True)
class Gemm:
    """One GEMM of a linear, and what it multiplied, in FP32.

        fprop   Y  = X W^T    first = W [N, K], second = X [M, K]
        dgrad   dX = G W      first = W [N, K], second = G [M, N]
        wgrad   dW = G^T X    first = X [M, K], second = G [M, N]

    NVFP4's operands of wgrad are rotated, both alike.
    """

    name: str
    module: Any
    first: Tensor
    second: Tensor


@dataclass
class _Call:
    """A forward of a module, and its backward."""

    module: Any
    formats: dict[str, set[str]] = field(default_factory=dict)


class _Probe:
    """What runs now, in this process."""

    module: Any = None  # whose forward has begun
    call: _Call | None = None  # whose GEMMs run
    kept: list[Gemm] | None = None


@contextmanager
def gemms() -> Iterator[list[Gemm]]:
    """Keep the operands of all GEMMs of linears in this context."""
    _Probe.kept = []
    try:
        yield _Probe.kept
    finally:
        _Probe.kept = None


def running_module() -> Any:
    """Return the linear whose forward or backward runs now."""
    assert _Probe.call is not None
    return _Probe.call.module


def format_name(operand: Any) -> str:
    """Return the recipe that an operand of a GEMM is quantized by."""
    kind = format_of(operand)
    if kind == "Float8":
        is_current = type(operand._quantizer).__name__ == "Float8CurrentScalingQuantizer"
        return "tensorwise" if is_current else "delayed"
    return _FORMATS[kind]


def _note(trans_a: bool, trans_b: bool, first: Any, second: Any) -> None:
    call = _Probe.call
    if call is None:
        return
    name = _LAYOUTS[trans_a, trans_b]
    label = "|".join(dict.fromkeys(format_name(operand) for operand in (first, second)))
    call.formats.setdefault(name, set()).add(label)
    if _Probe.kept is not None:
        values = values_of(first, not trans_a), values_of(second, trans_b)
        _Probe.kept.append(Gemm(name, call.module, *values))


def _watch_gemms(tex: Any) -> None:
    generic = tex.generic_gemm
    grouped = tex.te_general_grouped_gemm

    @functools.wraps(generic)
    def generic_gemm(A: Any, transA: bool, B: Any, transB: bool, *args: Any, **kwargs: Any) -> Any:
        _note(transA, transB, A, B)
        return generic(A, transA, B, transB, *args, **kwargs)

    @functools.wraps(grouped)
    def grouped_gemm(A: Any, transa: bool, B: Any, transb: bool, *args: Any, **kwargs: Any) -> Any:
        for first, second in zip(A, B, strict=True):
            _note(transa, transb, first, second)
        return grouped(A, transa, B, transb, *args, **kwargs)

    tex.generic_gemm = generic_gemm
    tex.te_general_grouped_gemm = grouped_gemm


def _watch_function(function: Any) -> None:
    """Note whose GEMMs an autograd function runs."""
    forward = function.forward
    backward = function.backward

    @functools.wraps(forward)
    def watched_forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        call = _Call(_Probe.module)
        if ctx is not None:
            ctx.watched_call = call
        return _within(call, forward, ctx, *args, **kwargs)

    @functools.wraps(backward)
    def watched_backward(ctx: Any, *gradients: Any) -> Any:
        call = ctx.watched_call
        result = _within(call, backward, ctx, *gradients)
        formats = ("+".join(sorted(call.formats.get(name, {"none"}))) for name in NAMES)
        call.module.seen.append(tuple(formats))
        return result

    function.forward = staticmethod(watched_forward)
    function.backward = staticmethod(watched_backward)


def _within(call: _Call, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    before = _Probe.call
    _Probe.call = call
    try:
        return function(*args, **kwargs)
    finally:
        _Probe.call = before


def _watch_modules(cls: Any) -> None:
    """Note which module's forward begins, and when it makes quantizers."""
    original_init = cls.__init__
    prepare = cls.prepare_forward
    set_meta_tensor = cls.set_meta_tensor

    @functools.wraps(original_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original_init(self, *args, **kwargs)
        self.__dict__["seen"] = []
        self.__dict__["num_builds"] = 0

    @functools.wraps(prepare)
    def prepare_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        _Probe.module = self
        return prepare(self, *args, **kwargs)

    @functools.wraps(set_meta_tensor)
    def counted(self: Any, fwd: bool, recipe: Any) -> None:
        before = self.quantizers.get("scaling_fwd")
        set_meta_tensor(self, fwd, recipe)
        self.num_builds += self.quantizers.get("scaling_fwd") is not before

    cls.__init__ = init
    cls.prepare_forward = prepare_forward
    cls.set_meta_tensor = counted


@functools.cache
def install() -> None:
    """Watch all linears of this process that are made from now on."""
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.module import base, grouped_linear, layernorm_linear, linear

    _watch_gemms(tex)
    for function in (
        linear._Linear,
        layernorm_linear._LayerNormLinear,
        grouped_linear._GroupedLinear,
    ):
        _watch_function(function)
    _watch_modules(base.TransformerEngineBaseModule)

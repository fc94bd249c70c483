"""The seam: `_forward_impl` of Megatron's linears, overridden on the instance.

ColumnParallelLinear and RowParallelLinear call `self._forward_impl(input=..., weight=..., ...)`
by keyword and do everything else (copy to or gather from the tensor-parallel region, reduce, bias)
around it. A linear at bf16 calls the original with everything passed on untouched, so it is
bitwise Megatron's own; deleting the instance attribute puts the class's method back.

Each GEMM of an option runs on FP8 tensor cores or is simulated (`backends.resolve`); an option can
mix both. Changing the option compiles nothing and waits for nothing: it is data of the next call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any

import torch

from megatron_snip.linears import backends, printed
from megatron_snip.linears.autograd import LinearCall, QuantizedLinear
from megatron_snip.linears.backends import Backend, Machine
from megatron_snip.linears.gemms import unkept
from megatron_snip.linears.runtime import Mode, Runtime
from megatron_snip.log import warn_once
from megatron_snip.options import BF16, Option
from megatron_snip.quantizers import StochasticStream
from megatron_snip.topology import Placement
from megatron_snip.types import Gemm

logger = logging.getLogger(__name__)

_ATTRIBUTE = "_forward_impl"


class PlannedLinear:
    """One linear of the model under SNIP: its placement, its option and its override.

    Attributes:
        placement: name and shard.
        module: Megatron's linear.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        placement: Placement,
        runtime: Runtime,
        choice: str = "simulate",
        machine: Machine | None = None,
    ) -> None:
        """Prepare; nothing is overridden yet.

        Args:
            module: Megatron's linear.
            placement: name and shard.
            runtime: shared by all linears of the process.
            choice: `--snip-backend`: auto, simulate or native.
            machine: where it runs; with a choice other than simulate, what native GEMMs obey.
        """
        self.placement = placement
        self.module = module
        self._runtime = runtime
        self._choice = choice
        self._machine = Machine() if machine is None else machine
        self._option: Option = BF16
        self._native: frozenset[Gemm] = frozenset()
        self._original: Callable[..., torch.Tensor] = getattr(module, _ATTRIBUTE)
        self._pass_number = -1
        self._backwards = 0

    @property
    def option(self) -> Option:
        """Formats of its GEMMs; assign between steps only, on all ranks alike."""
        return self._option

    @option.setter
    def option(self, option: Option) -> None:
        self._option = option
        self._native = frozenset(g for g in Gemm if self._backend_of(g) is Backend.NATIVE)

    @property
    def weight(self) -> torch.nn.Parameter:
        """The module's weight, [N, K] of this shard."""
        weight = self.module.weight
        assert isinstance(weight, torch.nn.Parameter)
        return weight

    @property
    def backend(self) -> Backend:
        """Who runs it: native if any GEMM does under the present option, else simulate."""
        return Backend.NATIVE if self._native else Backend.SIMULATE

    @property
    def recipe(self) -> str:
        """What runs the GEMMs, for people; by GEMM where they differ."""
        words = [_word(self._option[g], g in self._native) for g in Gemm]
        return words[0] if len(set(words)) == 1 else "-".join(words)

    def refusal(self, option: Option) -> str | None:
        """Return why this linear cannot run `option` here, or None if it can."""
        if self._choice != "native":
            return None
        return backends.refusal(Backend.NATIVE, option, self._machine)

    def _backend_of(self, gemm: Gemm) -> Backend | None:
        name = self._option[gemm]
        if name == "bf16":
            return None
        return backends.resolve(self._choice, name, gemm, self._machine)

    def install(self) -> None:
        """Override the instance's `_forward_impl`. Doing so twice changes nothing."""
        current = self.module.__dict__.get(_ATTRIBUTE)
        if current is None:
            setattr(self.module, _ATTRIBUTE, self._forward)
        elif current != self._forward:
            raise RuntimeError(
                f"{self.placement.name}: {_ATTRIBUTE} is already overridden by "
                f"{current!r}; undo that first"
            )
        printed.show(self.module, lambda: f"{self._option}, {self.recipe}")

    def uninstall(self) -> None:
        """Put the class's method back, unless someone else has overridden it since."""
        printed.hide(self.module)
        if self.module.__dict__.get(_ATTRIBUTE) == self._forward:
            delattr(self.module, _ATTRIBUTE)

    def _forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        output = self._run(args, kwargs)
        observer = self._runtime.observer
        if observer is None:
            return output
        input, weight = _operands(args, kwargs)
        gathers = bool(kwargs.get("sequence_parallel", False))
        return observer.observe(self.placement, input, weight, output, input_is_split=gathers)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        bf16 = self._option == BF16 or self._runtime.mode is Mode.BF16
        if bf16 or not self._quantizable(kwargs):
            return self._original(*args, **kwargs)
        input, weight = _operands(args, kwargs)
        call = LinearCall(
            option=self._option,
            stream=self._next_stream,
            sequence_parallel=bool(kwargs.get("sequence_parallel", False)),
            allreduce_dgrad=bool(kwargs.get("allreduce_dgrad", False)),
            fuse_wgrad=bool(kwargs.get("gradient_accumulation_fusion", False)),
            tp_group=kwargs.get("tp_group") or self.placement.tensor.group,
            native=self._native,
            keep=self._keeper(weight),
            grad_enabled=torch.is_grad_enabled(),
        )
        output: torch.Tensor = QuantizedLinear.apply(  # type: ignore[no-untyped-call]
            input, weight, kwargs.get("bias"), call
        )
        return output

    def _keeper(self, weight: torch.Tensor) -> Callable[[Hashable, Callable[[], Any]], Any]:
        """Return what keeps forms of the weight; in evaluations nothing is kept."""
        if not self.module.training:
            return unkept
        kept, owner = self._runtime.kept, self.placement.instance
        return lambda form, make: kept.get(owner, form, weight, make)

    def _quantizable(self, kwargs: dict[str, Any]) -> bool:
        """Whether a call needs only what `QuantizedLinear` does; else say once why not."""
        reason = None
        if kwargs.get("grad_output_buffer") is not None:
            reason = "its weight gradient is deferred"
        elif int(kwargs.get("gtp_remat_size") or 1) > 1:
            reason = "its weight is gathered inside the GEMM (gtp_remat_size > 1)"
        if reason:
            warn_once(
                logger, f"{self.placement.name} stays in bf16 although planned otherwise: {reason}"
            )
        return reason is None

    def _next_stream(self) -> StochasticStream:
        """Return the stream of this backward; backwards of a pass come in microbatch order."""
        if self._runtime.pass_number != self._pass_number:
            self._pass_number, self._backwards = self._runtime.pass_number, 0
        stream = self._runtime.stream(self.placement, self._backwards)
        self._backwards += 1
        return stream


def _word(name: str, is_native: bool) -> str:
    if name == "bf16":
        return "megatron"
    return "native" if is_native else "simulated"


def _operands(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (input, weight), which Megatron passes by keyword."""
    names = ("input", "weight")
    found = dict(zip(names, args, strict=False)) | {n: kwargs[n] for n in names if n in kwargs}
    return found["input"], found["weight"]

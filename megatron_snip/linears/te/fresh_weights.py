"""Quantized weights that are made anew in every step, also where Megatron does not say so."""

from collections.abc import Callable, Collection
from typing import Any

from megatron_snip.errors import UnsupportedError
from megatron_snip.linears.planned_linear import PlannedTELinear

_FIRST_MICROBATCH = "set_is_first_microbatch"
"""What Megatron's schedules call on each model chunk when a step begins."""


class FreshWeights:
    """Makes Transformer Engine quantize the weights of one model chunk again in every step.

    Transformer Engine quantizes a weight in the first microbatch of a step and reuses the result.
    Megatron's schedules call `set_is_first_microbatch` on each chunk, in training and evaluation.
    But Megatron passes it on only where the run quantizes by default (from 0.19 also with
    `--te-precision-config-file`). In a BF16 run that SNIP plans, weights would be quantized once
    and never again (NVIDIA/Megatron-LM#5641). So the method is overridden on the chunk.
    """

    def __init__(self, chunk: Any, linears: Collection[PlannedTELinear]) -> None:
        """Check the chunk.

        Args:
            chunk: what Megatron's schedules run.
            linears: those of its linears that keep what they make of their weights.

        Raises:
            UnsupportedError: if the chunk has no such method.
        """
        if not hasattr(chunk, _FIRST_MICROBATCH):
            raise UnsupportedError(
                f"the model chunk {type(chunk).__name__} has no {_FIRST_MICROBATCH}, so quantized "
                "weights would become stale; wrap it in a MegatronModule"
            )
        self._chunk = chunk
        self._linears = linears
        self._original: Callable[[], None] = getattr(chunk, _FIRST_MICROBATCH)

    def install(self) -> None:
        """Override the instance's method; idempotent."""
        self._chunk.__dict__.setdefault(_FIRST_MICROBATCH, self._begin_step)

    def uninstall(self) -> None:
        """Restore the class's method, unless another override has replaced ours."""
        if self._chunk.__dict__.get(_FIRST_MICROBATCH) == self._begin_step:
            del self._chunk.__dict__[_FIRST_MICROBATCH]

    def _begin_step(self) -> None:
        # The quantized weights are dropped. Setting the modules' `is_first_microbatch` would also
        # quantize again. But with it a fused weight gradient overwrites `main_grad` instead of
        # adding to it, which is wrong for a module that runs twice in a microbatch.
        for linear in self._linears:
            linear.begin_step()
        self._original()

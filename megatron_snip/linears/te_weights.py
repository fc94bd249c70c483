"""Fresh quantized weights in every step, whatever precision the run has by default.

Transformer Engine quantizes a weight in the first microbatch of a step and reuses the result in
the others. Megatron says which is the first (`set_is_first_microbatch`, called on a model chunk by
its schedules in training and evaluation) but, up to 0.18, passes it on only where the whole run
quantizes; in a BF16 run whose modules have recipes, weights would be quantized once and never
again (NVIDIA/Megatron-LM#5641).

We listen on the chunk and forget the quantized weights. Raising the modules' own flag would do as
well, but makes a fused weight gradient overwrite `main_grad` in place of adding to it, which is
wrong for a module that runs twice in a microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_snip.errors import UnsupportedError
from megatron_snip.linears.te_seam import forget_weights

_ATTRIBUTE = "set_is_first_microbatch"


class FreshWeights:
    """Listens on one model chunk for the first microbatch of a forward-backward."""

    def __init__(self, chunk: torch.nn.Module, modules: Sequence[torch.nn.Module]) -> None:
        """Prepare.

        Args:
            chunk: what Megatron's schedules run.
            modules: the planned Transformer Engine linears in it.

        Raises:
            UnsupportedError: if the chunk is not told of first microbatches.
        """
        if not hasattr(chunk, _ATTRIBUTE):
            raise UnsupportedError(
                f"the model chunk {type(chunk).__name__} has no {_ATTRIBUTE}; Transformer Engine's "
                "quantized weights could not be kept fresh; wrap it in a MegatronModule"
            )
        self._chunk: Any = chunk
        self._modules = tuple(modules)
        self._original: Callable[[], None] = getattr(chunk, _ATTRIBUTE)

    def install(self) -> None:
        """Override the instance's method; idempotent."""
        self._chunk.__dict__.setdefault(_ATTRIBUTE, self._first_microbatch)

    def uninstall(self) -> None:
        """Put the class's method back, unless someone else has overridden it since."""
        if self._chunk.__dict__.get(_ATTRIBUTE) == self._first_microbatch:
            del self._chunk.__dict__[_ATTRIBUTE]

    def _first_microbatch(self) -> None:
        for module in self._modules:
            forget_weights(module)
        self._original()

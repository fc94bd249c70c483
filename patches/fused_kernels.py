"""Megatron's legacy CUDA kernels, which 0.16 builds at every start: without a GPU there is no nvcc.

They serve fused softmax alone, and the layers that a CPU run uses do not ask for it.
"""

from __future__ import annotations

from typing import Any

from megatron_snip.patches.seam import Function, Seam, wrapping
from megatron_snip.patches.session import Session
from megatron_snip.patches.target import Target


def _wrap(original: Function, session: Session) -> Function:
    @wrapping(original)
    def load(*args: Any, **kwargs: Any) -> None:
        return None

    return load


SEAM = Seam(
    name="fused-kernels",
    purpose="builds no CUDA kernels",
    target=Target("megatron.legacy.fused_kernels", "load", versions=">=0.16,<0.17"),
    wrap=_wrap,
    when="--cpu",
    optional=True,
)

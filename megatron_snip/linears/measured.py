"""A linear's own GEMMs in a measuring pass: fprop and dgrad, without the wgrad that nobody reads.

The passes of a refresh discard gradients, and pass A forms the weight's itself from X and G.
Megatron runs a weight that needs no gradient through a linear of its own, the same in fprop and
dgrad; given the weight detached it saves a third of a pass's GEMMs, and no gradient hook runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def without_wgrad(original: Callable[..., torch.Tensor], kwargs: dict[str, Any]) -> torch.Tensor:
    """Return `original(**kwargs)`; in its backward the weight and the bias get no gradient.

    Where the output would then need no gradient at all (its input comes from frozen layers), or
    the call asks for what Megatron's linear for frozen weights refuses, they do.

    Args:
        original: `_forward_impl` of ColumnParallelLinear or RowParallelLinear.
        kwargs: what Megatron calls it with.
    """
    refused = (
        kwargs.get("grad_output_buffer") is not None
        or kwargs.get("wgrad_deferral_limit") is not None
        or int(kwargs.get("gtp_remat_size") or 1) > 1
    )
    needed = torch.is_grad_enabled() and kwargs["input"].requires_grad
    if needed and not refused:
        names = [name for name in ("weight", "bias") if kwargs.get(name) is not None]
        kwargs = {**kwargs, **{name: kwargs[name].detach() for name in names}}
    return original(**kwargs)

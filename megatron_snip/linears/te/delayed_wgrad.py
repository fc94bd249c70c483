"""Weight gradients after the backward (`--delay-wgrad-compute`), of simulated GEMMs.

Transformer Engine's own backward puts the operands of wgrad and a function into the module's
`wgrad_store`, a queue. Megatron's schedule calls `backward_dw` later, while ranks communicate; it
takes one entry for each backward. A simulated backward puts its entries there as well.

    Linear          function(X, G) -> (dW, db)
    GroupedLinear   function(X, G, [dW of each expert]) fills the list and returns (_, [db], _)

With fused accumulation the function adds dW into `main_grad`, and what it returns is not read.
Biases are added outside of the simulated GEMM, so their gradients are not delayed.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from megatron_snip.linears.quantized_linear import WgradFunction
from megatron_snip.linears.te.modules import is_grouped

Deferral = Callable[[Tensor, Tensor, WgradFunction], None]
"""Gets wgrad's operands, Q(G) and Q(X), and what multiplies them."""

_Entry = tuple[Tensor, Tensor, WgradFunction]


def delays_wgrad(module: Any) -> bool:
    """Whether a Transformer Engine linear computes weight gradients after the backward."""
    store = getattr(module, "wgrad_store", None)
    return store is not None and bool(store.delay_wgrad_compute())


def deferrals(module: Any, num_weights: int) -> list[Deferral | None]:
    """Return, for each weight, what takes its gradient in the backward of one forward.

    Args:
        module: a Transformer Engine linear.
        num_weights: one, or one for each expert.

    Returns:
        None for each weight if the module computes weight gradients in the backward.
    """
    if not delays_wgrad(module):
        return [None] * num_weights
    store = module.wgrad_store
    waiting: dict[int, _Entry] = {}

    def defer(g: Tensor, x: Tensor, wgrad: WgradFunction, index: int) -> None:
        waiting[index] = g, x, wgrad
        if len(waiting) < num_weights:
            return
        entries = [waiting.pop(i) for i in range(num_weights)]
        if is_grouped(module):
            _put_experts(store, entries)
        else:
            g, x, own_wgrad = entries[0]
            store.put([x, g], lambda x, g: (own_wgrad(g, x), None))

    return [partial(defer, index=i) for i in range(num_weights)]


def _put_experts(store: Any, entries: list[_Entry]) -> None:
    gs, xs, functions = zip(*entries, strict=True)

    def wgrads(xs: Any, gs: Any, results: list[Tensor | None]) -> tuple[None, list[None], None]:
        for i, (g, x, wgrad) in enumerate(zip(gs, xs, functions, strict=True)):
            results[i] = wgrad(g, x)
        return None, [None] * len(results), None

    store.put([xs, gs, [None] * len(entries)], wgrads)

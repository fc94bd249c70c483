"""Weights that the job stores quantized (`--fp8-param-gather`), in the high precision of a plan.

A stored weight has lost what its format cannot hold. Under an option other than the job's own the
module multiplies a BF16 weight instead:

    dequantized   the stored weight in BF16. Any GEMM may run it in BF16 or in the stored format,
                  to which it is rounded again without a change
    exact         the BF16 weight that Megatron has gathered, saved before it was quantized; any
                  option may run it

There is one copy for a linear that the plan moves away from the job's own option, 2 bytes an
element, and none for other linears. A dequantized copy lives until the next step.

Transformer Engine reads the weights in `_get_weight_tensors`, which is overridden on the module.
The gradient goes to the stored parameter: with fused accumulation the copy carries its `main_grad`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_snip.quantizers.stored import high_precision, is_quantized

_CARRIED = (
    "main_grad",
    "grad_added_to_main_grad",
    "zero_out_wgrad",
    "overwrite_main_grad",
    # Megatron-FSDP's
    "__fsdp_param__",
    "get_main_grad",
)
"""Attributes of a parameter that a fused weight gradient reads."""


def stored_weights(module: Any, weights: Sequence[torch.nn.Parameter]) -> "StoredWeights | None":
    """Return the copies of a module's weights; None where they are stored in high precision."""
    return StoredWeights(module, weights) if any(map(is_quantized, weights)) else None


class StoredWeights:
    """The copies in high precision of one module whose weights are stored quantized.

    Attributes:
        weights: the parameters.
        gets_exact: whether `save_exact` is called after every step.
    """

    def __init__(self, module: Any, weights: Sequence[torch.nn.Parameter]) -> None:
        """Prepare; nothing is overridden yet."""
        self._module = module
        self.weights = tuple(weights)
        self._dequantized: dict[int, Tensor] = {}
        self._exact: dict[int, Tensor] = {}
        self._keeps_copies = False
        self._is_captured = False
        self._is_primary = bool(module.primary_weights_in_fp8)
        self.gets_exact = False

    @property
    def num_copies(self) -> int:
        """The number of BF16 weights that are kept now."""
        return len(self._dequantized.keys() | self._exact.keys())

    @property
    def keeps_copies(self) -> bool:
        """Whether the plan's option needs copies, which are then made once a step."""
        return self._keeps_copies

    @keeps_copies.setter
    def keeps_copies(self, value: bool) -> None:
        self._keeps_copies = value
        if not value:
            self._dequantized.clear()
            self._exact.clear()

    @property
    def lacks_exact(self) -> bool:
        """Whether the plan's option needs exact copies, and a weight has none."""
        return self.gets_exact and self._keeps_copies and len(self._exact) < len(self.weights)

    def save_exact(self, weight: torch.nn.Parameter, value: Tensor) -> None:
        """Copy what Megatron has gathered for one of the weights, before it is quantized."""
        # By identity: `==` of parameters compares elements.
        index = next(i for i, own in enumerate(self.weights) if own is weight)
        kept = self._exact.get(index)
        if kept is None:
            kept = self._exact[index] = torch.empty(
                weight.shape, dtype=weight.dtype, device=value.device
            )
        kept.copy_(value.detach().view(weight.shape))  # captured CUDA graphs read this memory

    def prepare_capture(self) -> None:
        """From now on dequantize in every forward: a CUDA graph would keep a copy forever."""
        self._is_captured = True
        self._dequantized.clear()

    def begin_step(self) -> None:
        """Forget the weights of the step before."""
        self._dequantized.clear()

    def override(self) -> None:
        """From now on the module multiplies the copies; idempotent."""
        self._module.__dict__["_get_weight_tensors"] = self.copies
        # Else Transformer Engine compares the plan's recipe with the format of the parameter.
        self._module.fast_setattr("primary_weights_in_fp8", False)

    def restore(self) -> None:
        """The module multiplies its parameters again; idempotent."""
        self._module.__dict__.pop("_get_weight_tensors", None)
        self._module.fast_setattr("primary_weights_in_fp8", self._is_primary)

    def value(self, index: int) -> Tensor:
        """Return a weight in high precision, without gradients: its copy, or a new tensor."""
        if index in self._exact:
            return self._exact[index]
        if index in self._dequantized:
            return self._dequantized[index]
        return high_precision(self.weights[index])

    def copies(self) -> list[Tensor]:
        """Return the copies, through which gradients reach the parameters."""
        return [self._copy(i, weight) for i, weight in enumerate(self.weights)]

    def _copy(self, index: int, weight: torch.nn.Parameter) -> Tensor:
        value = self.value(index)
        if self._keeps_copies and not self._is_captured and index not in self._exact:
            self._dequantized[index] = value
        if not weight.requires_grad:
            return value
        fuses_wgrad = bool(self._module.fuse_wgrad_accumulation)
        copy: Tensor = _Copy.apply(weight, value, fuses_wgrad)  # type: ignore[no-untyped-call]
        for name in _CARRIED:
            if hasattr(weight, name):
                setattr(copy, name, getattr(weight, name))
        return copy


class _Copy(torch.autograd.Function):
    """A weight's value in high precision; its gradient is the stored weight's."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, value: Tensor, fuses_wgrad: bool) -> Tensor:
        ctx.weight = weight
        ctx.fuses_wgrad = fuses_wgrad
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        weight = ctx.weight
        # Transformer Engine has flagged the copy; Megatron's hook reads the parameter.
        if ctx.fuses_wgrad and hasattr(weight, "grad_added_to_main_grad"):
            weight.grad_added_to_main_grad = True
        return grads[0], None, None

"""`fp32_logits`: a model's logits without BF16 rounding."""

from __future__ import annotations

import pytest
import torch

from benchmarks.lab import fp32_logits


class Head(torch.nn.Module):
    """A head that returns (logits, bias), its weight handed over or its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(48, 16, dtype=torch.bfloat16))

    def forward(
        self, input_: torch.Tensor, weight: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, None]:
        return input_ @ (self.weight if weight is None else weight).t(), None


class Model(torch.nn.Module):
    """A model with a head where Megatron's has it."""

    def __init__(self) -> None:
        super().__init__()
        self.output_layer = Head()


@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_exact_within_and_the_models_own_after(tied: bool) -> None:
    torch.manual_seed(0)
    model, hidden = Model(), torch.randn(8, 16, dtype=torch.bfloat16)
    weight = torch.randn(48, 16, dtype=torch.bfloat16) if tied else None
    used = model.output_layer.weight if weight is None else weight
    own = model.output_layer(hidden, weight=weight)[0]
    with torch.no_grad(), fp32_logits(model):
        exact = model.output_layer(hidden, weight=weight)[0]
    assert exact.dtype == torch.float32
    assert torch.equal(exact, hidden.float() @ used.float().t())
    assert not torch.equal(exact, own.float())
    assert torch.equal(model.output_layer(hidden, weight=weight)[0], own)

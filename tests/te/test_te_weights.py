"""Quantized weights: made anew in every step, once a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.extensions import transformer_engine as extension
from megatron_snip.linears.te_weights import FreshWeights
from transformer_engine.pytorch.quantizers import Quantized

from megatron_snip.errors import UnsupportedError
from megatron_snip.linears.model import PlannedModel
from megatron_snip.options import Option
from megatron_snip.topology import Topology
from tests.te.models import build, by_name, everything, losses

MXFP8 = Option.uniform("mxfp8")


def double(model: Any) -> None:
    """What an optimizer does between steps: it changes the weights in place."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)


def doubled_losses() -> list[float]:
    """Of a model that never ran with other weights."""
    model = build()
    double(model)
    under = PlannedModel([model], Topology(), seed=0)
    under.install()
    under.apply(everything(under, MXFP8))
    return losses(model)


def test_megatron_alone_would_go_on_with_the_first_step_s_weights() -> None:
    """The trap: no first microbatch is told of in a BF16 run whose modules have recipes."""
    model = build()
    recipe = extension.TEQuantizationRecipe(
        fp8_quantization_recipe="mxfp8", override_nonquantized_autocast=True
    )
    modules = list(by_name(PlannedModel([model], Topology(), seed=0)).values())
    for module in modules:
        module.te_quant_params = extension.TEQuantizationParams(recipe, None)
    losses(model)
    kept = [module._fp8_workspaces["weight"].rows.clone() for module in modules]
    double(model)
    assert losses(model) != doubled_losses()
    told = getattr(model.config, "quant_recipe", None) is not None  # 0.19 with a precision file
    assert not told
    for module, before in zip(modules, kept, strict=True):
        assert torch.equal(module._fp8_workspaces["weight"].rows, before)


def test_under_a_plan_every_step_has_its_own() -> None:
    model = build()
    under = PlannedModel([model], Topology(), seed=0)
    under.install()
    under.apply(everything(under, MXFP8))
    losses(model)
    double(model)
    assert losses(model) == doubled_losses()
    under.uninstall()


def test_microbatches_of_a_step_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    under = PlannedModel([model], Topology(), seed=0)
    under.install()
    under.apply(everything(under, MXFP8))
    made = []
    original = Quantized.quantize_

    def count(self: Quantized, tensor: torch.Tensor) -> None:
        if any(tensor.data_ptr() == module.weight.data_ptr() for module in modules):
            made.append(tensor.data_ptr())
        original(self, tensor)

    modules = by_name(under).values()
    monkeypatch.setattr(Quantized, "quantize_", count)
    for _ in range(2):
        made.clear()
        losses(model, num_microbatches=3)
        assert len(made) == len(set(made)) == 8
    under.uninstall()


def test_megatron_hears_of_first_microbatches_as_before() -> None:
    told = []

    class Chunk(torch.nn.Module):
        def set_is_first_microbatch(self) -> None:
            told.append(True)

    chunk = Chunk()
    fresh = FreshWeights(chunk, [])
    fresh.install()
    fresh.install()
    chunk.set_is_first_microbatch()
    assert told == [True]
    fresh.uninstall()
    fresh.uninstall()
    assert "set_is_first_microbatch" not in chunk.__dict__


def test_another_s_override_stays() -> None:
    chunk = build()
    fresh = FreshWeights(chunk, [])
    fresh.install()
    theirs = chunk.__dict__["set_is_first_microbatch"] = lambda: None
    fresh.uninstall()
    assert chunk.__dict__["set_is_first_microbatch"] is theirs


def test_a_chunk_that_is_not_told_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="Linear has no set_is_first_microbatch"):
        FreshWeights(torch.nn.Linear(2, 2), [])

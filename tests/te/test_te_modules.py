"""Which modules are Transformer Engine's linears, and what they multiply."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron_snip.linears.layout import find_linears
from megatron_snip.linears.te_modules import (
    gathers_input,
    is_grouped,
    multiplied_input,
    scatters_output,
    te_kind,
    weights_of,
)
from transformer_engine.pytorch.norms import normalized

from megatron_snip.errors import UnsupportedError
from megatron_snip.topology import Topology
from tests.te.models import EXPERTS, build

IN_LAYER = {
    "self_attention.linear_qkv": ("column", "TELayerNormColumnParallelLinear"),
    "self_attention.linear_proj": ("row", "TERowParallelLinear"),
    "mlp.linear_fc1": ("column", "TELayerNormColumnParallelLinear"),
    "mlp.linear_fc2": ("row", "TERowParallelLinear"),
}


def found(**changes: Any) -> list[tuple[Any, Any]]:
    return find_linears([build(**changes)], Topology())


def test_the_four_of_a_layer() -> None:
    linears = found()
    assert len(linears) == 8
    for module, place in linears:
        kind, cls = IN_LAYER[place.name.split(".", 3)[3]]
        assert (te_kind(module), place.kind, type(module).__name__) == (kind, kind, cls)
        assert not is_grouped(module)
        (weight,) = weights_of(module)
        assert weight is module.weight
        assert tuple(weight.shape) == (place.out_features, place.in_features)


def test_nothing_else_of_the_model_is_one() -> None:
    model = build()
    kinds = [te_kind(module) for module in model.modules()]
    assert sum(kind is not None for kind in kinds) == 8
    assert te_kind(torch.nn.Linear(2, 2)) is None
    assert te_kind(model.output_layer) is None


def test_megatrons_own_linears_are_not_transformer_engines() -> None:
    assert {te_kind(module) for module, _ in found(te=False)} == {None}


def test_grouped_experts_hold_a_weight_each() -> None:
    linears = found(grouped=True, **EXPERTS)
    experts = [(module, place) for module, place in linears if is_grouped(module)]
    assert len(experts) == 2 * 2 * 4
    for module, place in experts:
        kind = "column" if place.name.endswith("fc1") else "row"
        assert (te_kind(module), place.kind) == (kind, kind)
        weights = weights_of(module)
        assert len(weights) == 4
        assert weights[place.expert] is dict(module.named_parameters())[f"weight{place.expert}"]
    names = [place.name for _, place in experts]
    assert sorted(set(names)) == [
        f"decoder.layers.{i}.mlp.experts.linear_fc{j}" for i in range(2) for j in (1, 2)
    ]
    assert len({place.instance for _, place in experts}) == 16


def test_sequential_experts_are_modules_of_their_own() -> None:
    experts = [(m, p) for m, p in found(**EXPERTS) if p.expert is not None]
    assert len(experts) == 16 and not any(is_grouped(m) for m, _ in experts)
    assert {p.name for _, p in experts} == {
        f"decoder.layers.{i}.mlp.experts.linear_fc{j}" for i in range(2) for j in (1, 2)
    }


def test_weights_in_one_tensor_are_refused() -> None:
    module, _ = next((m, p) for m, p in found(grouped=True, **EXPERTS) if is_grouped(m))
    module.single_grouped_weight = True
    with pytest.raises(UnsupportedError, match="drop --moe-single-grouped-weight"):
        weights_of(module)


def test_tokens_are_gathered_and_scattered_under_sequence_parallelism_alone() -> None:
    for module, place in found():
        assert not gathers_input(module) and not scatters_output(module)
        module.sequence_parallel = True
        assert gathers_input(module) == (place.kind == "column")
        assert scatters_output(module) == (place.kind == "row")
    for module, _ in found(grouped=True, **EXPERTS):
        if is_grouped(module):
            module.sequence_parallel = True
            assert not gathers_input(module) and not scatters_output(module)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_multiplied_is_normalized(
    kind: str, zero_centered: bool, dtype: torch.dtype
) -> None:
    module, _ = found(normalization=kind, layernorm_zero_centered_gamma=zero_centered)[1]
    assert type(module).__name__ == "TELayerNormColumnParallelLinear"
    with torch.no_grad():
        module.layer_norm_weight.normal_(1.0, 0.3)
        if kind == "LayerNorm":
            module.layer_norm_bias.normal_(0.0, 0.3)
    x = torch.randn(5, 2, 64).mul(3).add(1).to(dtype).requires_grad_()
    normal = multiplied_input(module, x)
    truth = normalized(
        x, kind, module.layer_norm_weight, module.layer_norm_bias, module.eps, zero_centered
    )
    assert normal.dtype == dtype and not normal.requires_grad
    tolerance = 1e-6 if dtype == torch.float32 else 2.0**-8
    torch.testing.assert_close(normal, truth.detach(), rtol=tolerance, atol=tolerance)


def test_without_a_fused_norm_the_input_is_multiplied() -> None:
    module, _ = found()[0]
    assert type(module).__name__ == "TERowParallelLinear"
    x = torch.randn(3, 64)
    assert multiplied_input(module, x) is x

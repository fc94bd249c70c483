"""Which modules are Transformer Engine's linears, where they are, and what they multiply."""

from typing import Any

import pytest
import torch
from megatron.core.extensions import transformer_engine as extension

from megatron_snip.errors import UnsupportedError
from megatron_snip.linears.discovery import find_linears
from megatron_snip.linears.te.modules import (
    input_is_split,
    is_grouped,
    multiplied_input,
    output_is_split,
    te_kind,
    weights_of,
)
from megatron_snip.topology import Axis, Placement, Topology
from tests.models import EXPERTS, build, ours
from tests.te_on_cpu import probe

IN_LAYER = {
    "self_attention.linear_qkv": ("column", "TELayerNormColumnParallelLinear"),
    "self_attention.linear_proj": ("row", "TERowParallelLinear"),
    "mlp.linear_fc1": ("column", "TELayerNormColumnParallelLinear"),
    "mlp.linear_fc2": ("row", "TERowParallelLinear"),
}
SECOND_OF_TWO = Topology(rank=1, world_size=2, tp=Axis(1, 2))


def found(**changes: Any) -> list[tuple[Any, list[Placement]]]:
    return find_linears([build(**changes)], Topology())


def test_a_layer_has_four_linears_whose_tokens_sequence_parallelism_splits() -> None:
    model = build()
    linears = find_linears([model], Topology())
    assert len(linears) == 8 == sum(te_kind(module) is not None for module in model.modules())
    for module, (place,) in linears:
        kind, cls = IN_LAYER[place.name.split(".", 3)[3]]
        assert (te_kind(module), place.kind, type(module).__name__) == (kind, kind, cls)
        assert weights_of(module) == (module.weight,)
        assert tuple(module.weight.shape) == (place.out_features, place.in_features)
        assert not input_is_split(module) and not output_is_split(module)
        module.sequence_parallel = True
        assert input_is_split(module) == (place.kind == "column")
        assert output_is_split(module) == (place.kind == "row")
    assert {te_kind(module) for module, _ in found(te=False)} == {None}


@pytest.mark.parametrize("grouped", [False, True])
def test_experts_share_the_names_of_their_layer(grouped: bool) -> None:
    linears = found(grouped=grouped, **EXPERTS)
    experts = [(m, places) for m, places in linears if places[0].expert is not None]
    assert len(experts) == (4 if grouped else 16)
    assert all(is_grouped(m) == grouped for m, _ in experts)
    places = [place for _, each in experts for place in each]
    assert {place.name for place in places} == {
        f"decoder.layers.{i}.mlp.experts.linear_fc{j}" for i in range(2) for j in (1, 2)
    }
    assert len({place.instance for place in places}) == 16
    for module, each in experts if grouped else ():
        module.sequence_parallel = True
        assert not input_is_split(module) and not output_is_split(module)
        parameters = dict(module.named_parameters())
        assert [p.expert for p in each] == [0, 1, 2, 3]
        assert all(weights_of(module)[i] is parameters[f"weight{i}"] for i in range(4))
        module.single_grouped_weight = True
        with pytest.raises(UnsupportedError, match="drop --moe-single-grouped-weight"):
            weights_of(module)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fused_norm_is_applied_to_the_input(
    kind: str, zero_centered: bool, dtype: torch.dtype
) -> None:
    """What we measure is what Transformer Engine multiplies, up to the order of sums."""
    is_bf16 = dtype == torch.bfloat16
    norm = {"normalization": kind, "layernorm_zero_centered_gamma": zero_centered}
    module, _ = found(bf16=is_bf16, params_dtype=dtype, **norm)[1]
    with torch.no_grad():
        module.layer_norm_weight.normal_(1.0, 0.3)
        if kind == "LayerNorm":
            module.layer_norm_bias.normal_(0.0, 0.3)
    x = torch.randn(5, 2, 64).mul(3).add(1).to(dtype).requires_grad_()
    with probe.gemms() as gemms:
        module(x)
    (fprop,) = gemms
    tolerance = 2.0**-8 if is_bf16 else 2e-6
    normal = multiplied_input(module, x).float().reshape(10, 64)
    torch.testing.assert_close(normal, fprop.second, rtol=tolerance, atol=tolerance)


def test_replicated_linears(caplog: pytest.LogCaptureFixture) -> None:
    """One shard that all tensor-parallel ranks hold; bf16 where the tokens are not known."""
    model = build()
    for layer in model.decoder.layers:
        for name in ("linear_q_down_proj", "linear_wk"):
            linear = extension.TELinear(
                64,
                32,
                parallel_mode="duplicated",
                config=model.config,
                init_method=torch.nn.init.zeros_,
                bias=False,
                skip_bias_add=True,
                skip_weight_param_allocation=False,
            )
            setattr(layer.self_attention, name, linear)
    assert len(find_linears([model], Topology())) == 12 and not ours(caplog)  # on one rank
    model.config.tensor_model_parallel_size = 2
    places = {place.name: place for _, (place,) in find_linears([model], SECOND_OF_TWO)}
    assert len(places) == 10
    (text,) = [r.getMessage() for r in caplog.records if "stay BF16" in r.getMessage()]
    for i, layer in enumerate(model.decoder.layers):
        prefix = f"decoder.layers.{i}"
        place = places[f"{prefix}.self_attention.linear_q_down_proj"]
        assert (place.in_features, place.out_features) == (64, 32)
        assert (place.tp, place.tp.shard) == (Axis(rank=1), 0)
        assert places[f"{prefix}.mlp.linear_fc1"].tp == SECOND_OF_TWO.tp
        assert f"{prefix}.self_attention.linear_wk" in text
        for split in (False, True):
            model.config.sequence_parallel = split
            assert input_is_split(layer.self_attention.linear_q_down_proj) == split
            assert output_is_split(layer.self_attention.linear_q_down_proj) == split

"""Transformer Engine's linears, observed or simulated, against Megatron's own.

Same weights, same data, in FP32; GEMMs and norms are sums in another order, so X, W and G differ by
that alone, and losses and gradients of simulated GEMMs by that of the norm. At bf16 everywhere
Transformer Engine's forward runs, bit by bit. Statistics are functions of X, W and G; that those of
a refresh agree too, on ranks that share tokens and weights, is tested with the trainer in
tests/distributed/test_te.py.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel

from megatron_snip.formats import get_format
from megatron_snip.linears.model import PlannedModel
from megatron_snip.statistics.observer import StepObserver
from megatron_snip.statistics.sample import MOST_MICROBATCHES, MeasureSettings
from megatron_snip.topology import Placement, Topology
from tests.models import (
    EXPERTS,
    FP32,
    Choice,
    assignment,
    build,
    copy_weights,
    local_name,
    losses,
    planned,
)
from tests.te.observed import Keeper, agree, observed


def twins(grouped: bool = False, **changes: Any) -> tuple[GPTModel, GPTModel]:
    te, local = build(grouped=grouped, **FP32, **changes), build(te=False, **FP32, **changes)
    copy_weights(te, local)
    return te, local


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"normalization": "LayerNorm"},
        {"gated_linear_unit": False, "activation_func": torch.nn.functional.gelu},
        {"num_query_groups": 1, "layernorm_zero_centered_gamma": False},
        EXPERTS,
        {**EXPERTS, "grouped": True},
    ],
    ids=["RMSNorm", "LayerNorm", "ungated", "grouped queries", "sequential", "grouped experts"],
)
def test_observers_see_what_they_see_of_megatrons_own_linears(changes: dict[str, Any]) -> None:
    te, local = (observed(model, planned(model)) for model in twins(**changes))
    assert len(te) == (20 if "num_moe_experts" in changes else 8)
    assert {len(each) for each in te.values()} == {2}
    agree(te, local)


def gathered_for_the_backward(module: Any, inputs: Any, outputs: Any) -> Any:
    """A forward hook as Megatron-FSDP's where experts overlap: the weight is gone until then."""
    complete = module.weight.detach().clone()
    module.weight.data.zero_()

    def gather(grads: Any) -> None:
        module.weight.data.copy_(complete)

    output, bias = outputs
    output = output.view_as(output)
    torch.autograd.graph.register_multi_grad_hook([output], gather, mode="any")
    return output, bias


def test_a_weight_that_a_backward_hook_gathers_is_read_after_it() -> None:
    model = build()
    wanted = observed(model, planned(model))
    model = build()
    for module in model.modules():
        if hasattr(module, "te_quant_params"):
            module.register_forward_hook(gathered_for_the_backward)
    found = observed(model, planned(model))
    assert found.keys() == wanted.keys() and len(found) == 8
    for instance, each in wanted.items():
        for mine, theirs in zip(found[instance], each, strict=True):
            assert all(map(torch.equal, mine, theirs)), instance


@pytest.mark.parametrize("grouped", [False, True])
def test_experts_without_tokens_show_no_rows(grouped: bool) -> None:
    models = twins(grouped, **EXPERTS, normalization="LayerNorm")
    for layer in (layer for model in models for layer in model.decoder.layers):
        # All tokens are alike, so the router gives them the same two of four experts.
        torch.nn.init.zeros_(layer.pre_mlp_layernorm.weight)
        torch.nn.init.ones_(layer.pre_mlp_layernorm.bias)
    te, local = (observed(model, planned(model)) for model in models)
    agree(te, local)
    for layer in range(2):
        for module in ("linear_fc1", "linear_fc2"):
            prefix = f"decoder.layers.{layer}.mlp.experts.{module}"
            each = [te[instance] for instance in te if instance.startswith(prefix)]
            sizes = sorted(tuple(len(x) for x, _, _ in microbatches) for microbatches in each)
            assert sizes == [(0, 0), (0, 0), (32, 32), (32, 32)]


class CountingObserver(StepObserver):
    """Notes how many experts share a tap that only counts."""

    def counted(
        self, placements: Sequence[Placement], num_tokens: Sequence[int], output: torch.Tensor
    ) -> torch.Tensor:
        self.shared = len(placements)
        return super().counted(placements, num_tokens, output)


@pytest.mark.parametrize("grouped", [False, True])
def test_experts_that_are_only_counted_share_one_tap_if_they_are_grouped(grouped: bool) -> None:
    model = build(grouped=grouped, **FP32, **EXPERTS)
    under = planned(model)
    observer = CountingObserver(MeasureSettings({"fp8": get_format("fp8")}, 1, 0), Topology())
    with under.runtime.observed_by(observer):
        losses(model, MOST_MICROBATCHES + 2)
    assert observer.shared == (4 if grouped else 1)
    table, _ = observer.table(under.job.linears, 1.0, None)
    by_name = {row.name: row for row in table.linears}
    qkv = by_name["decoder.layers.0.self_attention.linear_qkv"]
    fc2 = by_name["decoder.layers.1.mlp.experts.linear_fc2"]
    assert fc2.microbatches == 4 * (MOST_MICROBATCHES + 2)  # once for every expert
    assert fc2.tokens == 2 * qkv.tokens  # each token has two experts


GRADIENT_RTOL = 1e-2
"""Of a gradient's norm: a norm's last bit can move single elements to the next FP4 value."""


def simulated(model: Any, choice: Choice) -> PlannedModel:
    return planned(model, choice, backend="simulate")


def mixed(name: str) -> str:
    """An option of its own for each kind of linear; one has bf16 in one GEMM, one in all."""
    kinds = {"qkv": "fp8", "proj": "fp8-fp4-fp4", "fc1": "fp4", "fc2": "bf16-fp8-fp8"}
    return "bf16" if "layers.1" in name and "proj" in name else kinds[name.rsplit("_", 1)[1]]


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def run(model: Any, under: PlannedModel) -> tuple[list[float], dict[str, torch.Tensor]]:
    with under.runtime.training_pass(1):
        return losses(model), gradients(model)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"normalization": "LayerNorm", "add_bias_linear": True},
        {**EXPERTS},
        {**EXPERTS, "grouped": True},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ],
    ids=["RMSNorm", "LayerNorm and bias", "experts", "grouped", "recompute"],
)
def test_losses_and_gradients_are_those_of_megatrons_own_linears(changes: dict[str, Any]) -> None:
    (te, te_gradients), (local, wanted) = (
        run(model, simulated(model, mixed)) for model in twins(**changes)
    )
    assert te == pytest.approx(local, rel=1e-5) and te != losses(build(**changes))
    assert set(wanted) == {local_name(name) for name in te_gradients}
    for name, gradient in te_gradients.items():
        truth = wanted[local_name(name)]
        assert torch.norm(gradient - truth) <= GRADIENT_RTOL * torch.norm(truth), name


def test_observers_see_the_same() -> None:
    seen, wanted = (observed(model, simulated(model, mixed)) for model in twins())
    assert set(seen) == set(wanted)
    for instance, microbatches in seen.items():
        for found, truth in zip(microbatches, wanted[instance], strict=True):
            for a, b in zip(found, truth, strict=True):
                assert torch.norm(a - b) <= GRADIENT_RTOL * torch.norm(b), instance


@pytest.mark.real_te
@pytest.mark.parametrize("grouped", [False, True])
def test_bf16_is_transformer_engine_bit_by_bit(grouped: bool) -> None:
    changes = {**EXPERTS, "grouped": grouped} if grouped else {}
    truth = losses(model := build(**changes)), gradients(model)
    model = build(**changes)
    under = simulated(model, "bf16")
    assert run(model, under)[0] == truth[0]
    assert all(torch.equal(g, truth[1][n]) for n, g in gradients(model).items())
    under.apply(assignment(under, "fp4"))
    with under.runtime.running_in_bf16():
        assert losses(model) == truth[0]
    assert losses(model) != truth[0]
    under.uninstall()
    assert losses(model) == truth[0]
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.real_te
def test_biases_of_grouped_experts_are_added() -> None:
    model = build(grouped=True, add_bias_linear=True, **FP32, **EXPERTS)
    biases = {n: p for n, p in model.named_parameters() if ".experts." in n and ".bias" in n}
    assert len(biases) == 2 * 2 * EXPERTS["num_moe_experts"]
    for bias in biases.values():
        torch.nn.init.normal_(bias)
    plain = losses(model), gradients(model)
    model.zero_grad()
    found = run(model, simulated(model, "bf16-bf16-fp8"))
    assert found[0] == pytest.approx(plain[0], rel=1e-5)
    for name in biases:
        torch.testing.assert_close(found[1][name], plain[1][name], rtol=1e-4, atol=1e-6)


@pytest.mark.real_te
def test_fused_weight_gradients_add_up_in_main_grad() -> None:
    for changes in (FP32, {**FP32, **EXPERTS, "grouped": True}):
        model = build(**changes)
        separate = run(model, simulated(model, "fp4"))[1]
        model = build(**changes)
        under = simulated(model, "fp4")
        for linear in under.linears:
            linear.module.fuse_wgrad_accumulation = True
            for weight in linear.weights:
                weight.main_grad = torch.zeros_like(weight)
        run(model, under)
        for linear in under.linears:
            assert linear.module.is_first_microbatch is False
            for weight in linear.weights:
                name = next(n for n, p in model.named_parameters() if p is weight)
                torch.testing.assert_close(weight.main_grad, separate[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("choice", "backend", "changes"),
    [
        ("bf16", "te", {}),
        ("bf16", "te", {**EXPERTS, "grouped": True}),
        pytest.param(mixed, "simulate", {}, marks=pytest.mark.real_te),
    ],
    ids=["dense", "grouped", "simulated"],
)
def test_a_measurement_under_the_plan_is_an_identity(
    choice: Choice, backend: str, changes: dict[str, Any]
) -> None:
    model = build(**changes)
    under = planned(model, choice, backend=backend)
    plain = run(model, under)
    model.zero_grad()
    with under.runtime.observed_by(Keeper()):
        watched = run(model, under)
    assert plain[0] == watched[0] and set(plain[1]) == set(watched[1])
    assert all(torch.equal(g, watched[1][n]) for n, g in plain[1].items())

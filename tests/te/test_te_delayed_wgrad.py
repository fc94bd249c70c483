"""Delayed weight gradients (`--delay-wgrad-compute`) are those of the backward, bit by bit."""

from typing import Any

import pytest
import torch

from tests.models import EXPERTS, build, losses, planned

GROUPED = {**EXPERTS, "moe_ffn_hidden_size": 128, "grouped": True}
MIXED = {"qkv": "bf16", "proj": "fp8", "fc1": "fp4", "fc2": "fp8"}


def mixed(name: str) -> str:
    return MIXED[name.rsplit("_", 1)[1]]


def gradients(backend: str, changes: dict[str, Any], delayed: bool, fused: bool) -> Any:
    settings = {"bf16": True, "params_dtype": torch.bfloat16, "fp4": "e2m1", **changes}
    model = build(ffn_hidden_size=128, num_query_groups=2, **settings)
    under = planned(model, mixed, backend=backend)
    for linear in under.linears:
        linear.module.fuse_wgrad_accumulation = fused
        for weight in linear.weights if fused else ():
            weight.main_grad = torch.zeros(weight.shape, dtype=torch.float32)
            weight.grad_added_to_main_grad = False
    if delayed:
        from transformer_engine.pytorch.module._common import WeightGradStore

        model.config.delay_wgrad_compute = True
        for linear in under.linears:
            linear.module.wgrad_store = WeightGradStore(delay_wgrad_compute=True)
            # Megatron 0.19's grouped linears keep the setting that they were built with.
            linear.module.delay_wgrad_compute = True
    torch.manual_seed(3)
    found = losses(model, num_microbatches=1)
    for linear in reversed(under.linears) if delayed else ():
        if backend == "simulate" and not fused:
            assert all(weight.grad is None for weight in linear.weights), linear.name
        linear.module.backward_dw()
        linear.module.wgrad_store.assert_empty()
    grads = {
        placement.instance: weight.main_grad if fused else weight.grad
        for linear in under.linears
        for placement, weight in zip(linear.placements, linear.weights, strict=True)
    }
    return found, grads


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("changes", [{}, GROUPED], ids=["dense", "experts"])
@pytest.mark.parametrize("backend", ["te", "simulate"])
def test_they_are_those_of_the_backward(backend: str, changes: dict[str, Any], fused: bool) -> None:
    settings = dict(changes)
    truth = gradients(backend, settings, delayed=False, fused=fused)
    found = gradients(backend, settings, delayed=True, fused=fused)
    assert found[0] == truth[0]
    assert all(torch.equal(grad, truth[1][name]) for name, grad in found[1].items())
    assert all(float(grad.norm()) > 0 for grad in found[1].values() if fused)

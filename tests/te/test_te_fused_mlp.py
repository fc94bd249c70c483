"""MLPs with fused operations: the job's own, under plans, and where they are measured."""

from functools import partial
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import gpt_layer_specs

from megatron_snip.linears.model import PlannedModel
from megatron_snip.topology import Topology
from tests import models
from tests.models import losses, planned, recipe_file
from tests.te.observed import observed

MXFP8 = {"fp8": "e4m3", "fp8_recipe": "mxfp8"}
NVFP4 = {"fp4": "e2m1", "fp4_recipe": "nvfp4"}


def job(monkeypatch: pytest.MonkeyPatch, fused: bool = True, **changes: Any) -> Any:
    spec = partial(
        gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec, use_te_op_fuser=fused
    )
    monkeypatch.setattr(models, "get_gpt_layer_with_transformer_engine_spec", spec)
    settings = {"bf16": True, "params_dtype": torch.bfloat16, "num_query_groups": 2, **changes}
    return models.build(ffn_hidden_size=128, **settings)


def untouched(model: Any) -> PlannedModel:
    under = PlannedModel([model], Topology(), seed=7)
    under.install()
    return under


def step(model: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(3)  # NVFP4 rounds gradients at random
    model.zero_grad()
    found = losses(model)
    return found, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def equal(one: Any, other: Any) -> bool:
    same = one[0] == other[0] and set(one[1]) == set(other[1])
    return same and all(torch.equal(grad, other[1][name]) for name, grad in one[1].items())


def test_the_job_s_own_option_stays_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    truth = step(job(monkeypatch, **MXFP8))
    assert not equal(truth, step(job(monkeypatch, fused=False, **MXFP8)))
    model = job(monkeypatch, **MXFP8)
    under = untouched(model)
    assert equal(step(model), truth)
    under.uninstall()
    assert not any("forward" in layer.mlp.__dict__ for layer in model.decoder.layers)
    assert equal(step(model), truth)


@pytest.mark.parametrize(
    ("option", "alike"), [("bf16", {}), ("fp4", NVFP4), ("fp8", MXFP8)], ids=["bf16", "fp4", "fp8"]
)
def test_a_plan_runs_the_fused_operations_in_its_recipe(
    monkeypatch: pytest.MonkeyPatch, option: str, alike: dict[str, Any]
) -> None:
    truth = step(job(monkeypatch, **alike))
    model = job(monkeypatch, **MXFP8)
    under = untouched(model)
    first = step(model)
    under.apply(models.assignment(under, option))
    assert equal(step(model), truth)
    under.apply(models.assignment(under, "fp8"))
    assert equal(step(model), first)


def test_a_measured_iteration_calls_the_linears(monkeypatch: pytest.MonkeyPatch) -> None:
    model = job(monkeypatch, **MXFP8)
    before = step(model)
    under = untouched(model)
    seen = observed(model, under)
    assert {name.partition("/")[0] for name in seen} >= {info.name for info in under.job.linears}
    twin = job(monkeypatch, fused=False, **MXFP8)
    wanted = observed(twin, untouched(twin))
    assert set(seen) == set(wanted)
    for name, found in seen.items():
        for mine, theirs in zip(found, wanted[name], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)), name
    assert equal(step(model), before)


def test_linears_with_different_options_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def choice(name: str) -> str:
        return "bf16" if name.endswith("fc2") else "fp8"

    model = job(monkeypatch, **MXFP8)
    planned(model, choice)
    twin = job(monkeypatch, fused=False, **MXFP8)
    planned(twin, choice)
    assert equal(step(model), step(twin))


def test_the_linears_of_an_mlp_are_tied(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"decoder.layers.{layer}.mlp.linear_fc" for layer in range(2)]
    under = untouched(job(monkeypatch, **MXFP8))
    assert under.job.ties == tuple((f"{name}1", f"{name}2") for name in names)
    assert untouched(job(monkeypatch, fused=False, **MXFP8)).job.ties == ()


def test_a_precision_file_does_not_count_where_operations_are_fused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Megatron builds the operations from the weights, and runs them in the job's own recipe."""
    recipe = recipe_file({"*.linear_fc1": "bf16", "*.linear_qkv": "bf16"})
    under = untouched(job(monkeypatch, quant_recipe=recipe, **MXFP8))
    assert {str(under.job.options[each.name]) for each in under.linears} == {"bf16", "fp8"}
    assert set(under.job.rules) == {f"decoder.layers.{i}.self_attention.linear_qkv" for i in (0, 1)}
    truth = step(job(monkeypatch, quant_recipe=recipe, **MXFP8))
    model = job(monkeypatch, quant_recipe=recipe, **MXFP8)
    untouched(model)
    assert equal(step(model), truth)

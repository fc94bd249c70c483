"""Options on Transformer Engine's linears: set between iterations, run by the next forward."""

import logging
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from megatron.core.extensions import transformer_engine as extension
from transformer_engine.common.recipe import Format, MXFP8BlockScaling
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, fp8_autocast

from megatron_snip.errors import UnsupportedError
from megatron_snip.linears.model import PlannedModel
from megatron_snip.linears.te import quantizers
from megatron_snip.linears.te.linear import FreshWeights, PlannedTELinear
from megatron_snip.options import BF16, Option
from megatron_snip.topology import Topology
from tests.te.models import EXPERTS, batches, build, by_name, everything, forward_step, losses, plan

CHOICES = {
    "linear_qkv": "mxfp8",
    "linear_proj": "nvfp4",
    "linear_fc1": "nvfp4-mxfp8-bf16",
    "linear_fc2": "bf16",
}
OTHERS = {
    "linear_qkv": "nvfp4",
    "linear_proj": "mxfp8-bf16-nvfp4",
    "linear_fc1": "mxfp8-mxfp8-bf16",
    "linear_fc2": "mxfp8",
}
BF16_GEMMS = ("bf16",) * 3
MXFP8 = Option.uniform("mxfp8")
Seen = dict[str, set[tuple[str, ...]]]


@contextmanager
def planned(**changes: Any) -> Iterator[tuple[Any, PlannedModel]]:
    model = build(**changes)
    under = PlannedModel([model], Topology(), seed=0)
    under.install()
    yield model, under
    under.uninstall()


def apply(under: PlannedModel, choices: dict[str, str]) -> None:
    under.apply(plan(under, lambda name: choices[name.rsplit(".", 1)[1]]))


def expected(under: PlannedModel, choices: dict[str, str]) -> Seen:
    return {
        name: {Option.parse(choices[name.rsplit(".", 1)[1]]).formats} for name in by_name(under)
    }


def step(model: Any, under: PlannedModel) -> Seen:
    """Run a step; return what each linear's GEMMs ran in."""
    modules = by_name(under)
    for module in modules.values():
        module.seen.clear()
    assert len(losses(model)) == 2
    return {name: set(module.seen) for name, module in modules.items()}


def results(model: Any) -> list[torch.Tensor]:
    """Losses and gradients of one step."""
    model.zero_grad()
    loss = torch.tensor(losses(model))
    return [loss, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


@pytest.mark.real_te
def test_a_bf16_plan_is_bitwise_megatron_s_own() -> None:
    model = build()
    plain = results(model)
    under = PlannedModel([model], Topology(), seed=0)
    assert all(isinstance(linear, PlannedTELinear) for linear in under.linears)
    under.install()
    under.apply(everything(under))
    assert equal(results(model), plain)
    assert getattr(FP8GlobalStateManager, "entered", 0) == 0
    under.uninstall()


def test_every_linear_runs_its_option_from_the_next_step_on() -> None:
    with planned() as (model, under):
        for choices in (CHOICES, OTHERS, CHOICES, dict.fromkeys(CHOICES, "bf16"), OTHERS):
            apply(under, choices)
            assert step(model, under) == expected(under, choices)
        builds = [module.num_builds for module in by_name(under).values()]
        apply(under, OTHERS)
        losses(model)  # quantizers are reused while an option stays
        assert [module.num_builds for module in by_name(under).values()] == builds
        under.apply(plan(under, lambda name: "nvfp4" if ".layers.1." in name else "bf16"))
        for name, seen in step(model, under).items():
            assert seen == {("nvfp4" if ".layers.1." in name else "bf16",) * 3}, name


def test_a_new_option_needs_no_first_microbatch() -> None:
    """Recipes that differ by their factory alone have one class; cached weights must go."""

    def loss(model: Any) -> float:
        with torch.no_grad():  # outside of Megatron's schedules no microbatch is marked
            output, _ = forward_step(batches(), model)
        return float(output.mean())

    first, second = Option.parse("nvfp4-mxfp8-bf16"), Option.parse("mxfp8-nvfp4-bf16")
    with planned() as (model, under):
        under.apply(everything(under, first))
        before = [loss(model), loss(model)]
        under.apply(everything(under, second))
        changed = loss(model)
    with planned() as (model, under):
        under.apply(everything(under, second))
        assert loss(model) == changed
    assert before[0] == before[1] != changed


def test_a_recipe_of_the_same_class_is_replaced() -> None:
    """Transformer Engine reuses quantizers by the recipe's class, whatever else differs."""
    with planned() as (model, under):
        modules = by_name(under).values()
        under.uninstall()
        for fp8_format in ("hybrid", "e4m3"):  # Megatron alone: the second changes nothing
            recipe = extension.TEQuantizationRecipe(
                fp8_quantization_recipe="mxfp8",
                fp8_format=fp8_format,
                override_nonquantized_autocast=True,
            )
            for module in modules:
                module.te_quant_params = extension.TEQuantizationParams(recipe, None)
            losses(model)
            assert all(m.fp8_meta["state"].fp8_format is Format.HYBRID for m in modules)
        under.install()
        under.apply(everything(under, MXFP8))
        losses(model)
        assert all(m.fp8_meta["state"].fp8_format is Format.E4M3 for m in modules)


def test_the_plan_overrides_a_quantized_run_and_bf16_both() -> None:
    with planned() as (model, under):
        apply(under, CHOICES)
        before = losses(model)
        with under.runtime.running_in_bf16():
            assert set().union(*step(model, under).values()) == {BF16_GEMMS}
        assert losses(model) == before
        with fp8_autocast(enabled=True, fp8_recipe=MXFP8BlockScaling()):
            assert step(model, under) == expected(under, CHOICES)
            with under.runtime.running_in_bf16():
                assert set().union(*step(model, under).values()) == {BF16_GEMMS}
        under.uninstall()
        with fp8_autocast(enabled=True, fp8_recipe=MXFP8BlockScaling()):
            assert set().union(*step(model, under).values()) == {("mxfp8",) * 3}


def test_recomputed_forwards_run_the_plan() -> None:
    recompute = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    found = []
    for changes in ({}, recompute):
        with planned(**changes) as (model, under):
            apply(under, CHOICES)
            found.append(results(model))
            assert step(model, under) == expected(under, CHOICES)
    assert equal(*found)


def test_a_checkpoint_names_the_factory_of_a_custom_recipe() -> None:
    """Transformer Engine pickles a custom recipe into the state, and none of its own recipes."""
    with planned() as (model, under):
        apply(under, CHOICES)
        losses(model)
        state = model.state_dict()
        kept = {n: state[f"{n}._extra_state"].numpy().tobytes() for n in by_name(under)}
        for name, held in kept.items():
            assert bool(held) == name.endswith("linear_fc1")
            if held:
                assert pickle.loads(held)["recipe"].qfactory is quantizers.nvfp4_mxfp8_bf16
        before = losses(model)
        model.load_state_dict(state)
        assert losses(model) == before


def test_uninstalling_restores_every_module(caplog: pytest.LogCaptureFixture) -> None:
    model = build()
    under = PlannedModel([model], Topology(), seed=0)
    under.apply(everything(under, MXFP8))
    assert set().union(*step(model, under).values()) == {BF16_GEMMS}  # not installed yet
    modules = list(by_name(under).values())
    theirs = [object() for _ in modules]
    for module, params in zip(modules, theirs, strict=True):
        module.te_quant_params = params
        module._fp8_workspaces["weight"] = object()  # as a checkpoint may bring it
    with caplog.at_level(logging.WARNING):
        under.install()
        under.install()
    warnings = [r.getMessage() for r in caplog.records if "megatron_snip" in r.name]
    assert warnings == ["--te-precision-config-file is ignored: SNIP's plan sets recipes"]
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules] == [2] * 8
    assert not any(module._fp8_workspaces for module in modules)
    assert set().union(*step(model, under).values()) == {("mxfp8",) * 3}
    under.uninstall()
    under.uninstall()
    for module, params in zip(modules, theirs, strict=True):
        assert module.te_quant_params is params
        assert not module._forward_hooks and not module._forward_pre_hooks
    assert "set_is_first_microbatch" not in model.__dict__


def test_a_linear_refuses_what_it_cannot_run() -> None:
    mixed = Option.parse("nvfp4-mxfp8-bf16")
    with planned() as (_, under):
        assert under.linears[0].refusal(BF16) is under.linears[0].refusal(mixed) is None
        assert "no recipe for mxfp4" in str(under.linears[0].refusal(Option.uniform("mxfp4")))
    with planned(grouped=True, fp4="e2m1", **EXPERTS) as (_, under):
        for linear in (p for p in under.linears if len(p.placements) > 1):
            assert linear.refusal(Option.uniform("nvfp4")) is None
            assert "one format for all three GEMMs" in str(linear.refusal(mixed))
    with planned(hidden_size=72, num_attention_heads=2) as (_, under):
        assert "not a multiple of 32" in str(under.linears[0].refusal(MXFP8))


def test_a_gathered_input_has_no_more_bits_in_wgrad_than_in_fprop() -> None:
    """Transformer Engine makes the columns of a gathered input from the rows of its shards."""
    finer = ("nvfp4-mxfp8-bf16", "nvfp4-mxfp8-mxfp8", "mxfp8-nvfp4-bf16")
    others = ("mxfp8", "nvfp4", "nvfp4-mxfp8-nvfp4", "bf16-mxfp8-nvfp4", "mxfp8-nvfp4-nvfp4")
    with planned() as (_, under):
        for linear in under.linears:
            module: Any = linear.module
            module.sequence_parallel = True
            assert all(linear.refusal(Option.parse(text)) is None for text in others)
            for text in finer:
                reason = linear.refusal(Option.parse(text))
                assert (reason is None) == (linear.placements[0].kind == "row")
                assert reason is None or "wgrad cannot have more bits than fprop" in reason


@pytest.mark.real_te
@pytest.mark.parametrize("flag", ["ub_overlap_ag_fprop", "ub_overlap_rs_dgrad", "ub_bulk_wgrad"])
def test_overlapped_communication_is_refused(flag: str) -> None:
    model = build()
    setattr(model.decoder.layers[1].mlp.linear_fc1, flag, True)
    with pytest.raises(
        UnsupportedError, match=r"layers\.1\.mlp\.linear_fc1.*drop --tp-comm-overlap"
    ):
        PlannedModel([model], Topology(), seed=0)


# Quantized weights: new in every step, once per step.


@torch.no_grad()
def scale(model: Any) -> None:
    """Change the weights in place, as an optimizer does."""
    for parameter in model.parameters():
        parameter.mul_(1.25)


def test_every_step_quantizes_the_weights_again() -> None:
    """Megatron alone reuses the first step's weights: BF16 runs mark no first microbatch."""
    found = []
    for steps_before in (0, 1):
        with planned() as (model, under):
            under.apply(everything(under, MXFP8))
            for _ in range(steps_before):
                losses(model)
            scale(model)
            found.append(losses(model))
    assert found[0] == found[1]
    model = build()
    recipe = extension.TEQuantizationRecipe(
        fp8_quantization_recipe="mxfp8", override_nonquantized_autocast=True
    )
    for module in by_name(PlannedModel([model], Topology(), seed=0)).values():
        module.te_quant_params = extension.TEQuantizationParams(recipe, None)
    losses(model)
    scale(model)
    assert losses(model) != found[0]


def test_microbatches_of_a_step_share_quantized_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformer_engine.pytorch.quantizers import Quantized  # the stand-in's

    with planned() as (model, under):
        under.apply(everything(under, MXFP8))
        weights = {module.weight.data_ptr() for module in by_name(under).values()}
        made = []
        original = Quantized.quantize_

        def count(self: Quantized, tensor: torch.Tensor) -> None:
            made.append(tensor.data_ptr())
            original(self, tensor)

        monkeypatch.setattr(Quantized, "quantize_", count)
        for _ in range(2):
            made.clear()
            losses(model, num_microbatches=3)
            assert sorted(ptr for ptr in made if ptr in weights) == sorted(weights)


@pytest.mark.real_te
def test_the_chunk_s_own_method_is_called_and_restored() -> None:
    called = []

    class Chunk(torch.nn.Module):
        def set_is_first_microbatch(self) -> None:
            called.append(True)

    chunk = Chunk()
    fresh = FreshWeights(chunk, [])
    fresh.install()
    fresh.install()
    chunk.set_is_first_microbatch()
    assert called == [True]
    theirs = chunk.__dict__["set_is_first_microbatch"] = lambda: None
    fresh.uninstall()
    assert chunk.__dict__["set_is_first_microbatch"] is theirs  # another's override stays
    with pytest.raises(UnsupportedError, match="Linear has no set_is_first_microbatch"):
        FreshWeights(torch.nn.Linear(2, 2), [])

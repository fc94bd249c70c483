"""Options on Transformer Engine's linears: set between steps, obeyed by the next forward."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from megatron.core.extensions import transformer_engine as extension
from megatron_snip.linears.te_seam import PlannedTELinear
from transformer_engine.common.recipe import Format, MXFP8BlockScaling
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, fp8_autocast

from megatron_snip.errors import UnsupportedError
from megatron_snip.linears.model import PlannedModel
from megatron_snip.linears.runtime import Mode
from megatron_snip.options import BF16, Option
from megatron_snip.topology import Topology
from tests.te.models import (
    EXPERTS,
    batches,
    build,
    by_name,
    everything,
    forward_step,
    losses,
    plan,
)

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


def words(option: str) -> tuple[str, ...]:
    return Option.parse(option).formats


@contextmanager
def planned(**changes: Any) -> Iterator[tuple[Any, PlannedModel]]:
    model = build(**changes)
    under = PlannedModel([model], Topology(), seed=0)
    under.install()
    yield model, under
    under.uninstall()


def ran(under: PlannedModel) -> dict[str, set[tuple[str, ...]]]:
    """What each linear's GEMMs ran in since the last call."""
    found = {}
    for name, module in by_name(under).items():
        found[name] = set(module.seen)
        module.seen.clear()
    return found


def step(model: Any, under: PlannedModel) -> dict[str, set[tuple[str, ...]]]:
    ran(under)
    assert len(losses(model)) == 2
    return ran(under)


def gradients(model: Any) -> list[torch.Tensor]:
    model.zero_grad()
    losses(model)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_a_plan_of_bf16_is_bitwise_megatrons_own() -> None:
    model = build()
    plain = (losses(model), gradients(model))
    under = PlannedModel([model], Topology(), seed=0)
    assert all(isinstance(linear, PlannedTELinear) for linear in under.linears)
    under.install()
    under.apply(everything(under))
    again = (losses(model), gradients(model))
    assert again[0] == plain[0]
    assert all(map(torch.equal, again[1], plain[1]))
    assert FP8GlobalStateManager.entered == 0
    under.uninstall()


def test_every_linear_runs_its_own_option() -> None:
    with planned() as (model, under):
        under.apply(plan(under, lambda name: CHOICES[name.rsplit(".", 1)[1]]))
        for name, seen in step(model, under).items():
            assert seen == {words(CHOICES[name.rsplit(".", 1)[1]])}, name


def test_layers_are_told_apart() -> None:
    with planned() as (model, under):
        under.apply(plan(under, lambda name: "nvfp4" if ".layers.1." in name else "bf16"))
        for name, seen in step(model, under).items():
            assert seen == {words("nvfp4" if ".layers.1." in name else "bf16")}, name


def test_a_new_plan_holds_from_the_next_step() -> None:
    with planned() as (model, under):
        for choices in (CHOICES, OTHERS, CHOICES, dict.fromkeys(CHOICES, "bf16"), OTHERS):
            under.apply(plan(under, lambda name, c=choices: c[name.rsplit(".", 1)[1]]))  # type: ignore[misc]
            for name, seen in step(model, under).items():
                assert seen == {words(choices[name.rsplit(".", 1)[1]])}, name


def test_results_are_those_of_a_fresh_model_under_the_plan() -> None:
    """Nothing of an earlier plan is left over, weights' copies included."""
    with planned() as (model, under):
        under.apply(plan(under, lambda name: OTHERS[name.rsplit(".", 1)[1]]))
        losses(model)
        under.apply(plan(under, lambda name: CHOICES[name.rsplit(".", 1)[1]]))
        changed = (losses(model), gradients(model))
    with planned() as (model, under):
        under.apply(plan(under, lambda name: CHOICES[name.rsplit(".", 1)[1]]))
        fresh = (losses(model), gradients(model))
        under.apply(everything(under))
        assert losses(model) != fresh[0]
    assert changed[0] == fresh[0]
    assert all(map(torch.equal, changed[1], fresh[1]))


def test_a_new_option_needs_no_first_microbatch() -> None:
    """Recipes that differ by their factory alone are of one class; copies of weights must go."""

    def loss(model: Any) -> float:
        with torch.no_grad():  # outside of Megatron's schedules nobody tells of microbatches
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


def test_quantizers_are_kept_while_an_option_stays() -> None:
    with planned() as (model, under):
        under.apply(everything(under, Option.uniform("mxfp8")))
        for _ in range(3):
            under.apply(everything(under, Option.uniform("mxfp8")))
            losses(model)
        assert {module.num_builds for module in by_name(under).values()} == {1}


def test_a_recipe_of_the_same_class_does_not_survive() -> None:
    """Transformer Engine reuses quantizers by the recipe's class, whatever else differs."""
    hybrid = extension.TEQuantizationRecipe(
        fp8_quantization_recipe="mxfp8", fp8_format="hybrid", override_nonquantized_autocast=True
    )
    with planned() as (model, under):
        modules = by_name(under).values()
        under.uninstall()
        for module in modules:
            module.te_quant_params = extension.TEQuantizationParams(hybrid, None)
        losses(model)
        assert all(m.fp8_meta["state"].fp8_format is Format.HYBRID for m in modules)
        # Megatron alone: the recipe is another one, the quantizers are not.
        e4m3 = extension.TEQuantizationRecipe(
            fp8_quantization_recipe="mxfp8", override_nonquantized_autocast=True
        )
        for module in modules:
            module.te_quant_params = extension.TEQuantizationParams(e4m3, None)
        losses(model)
        assert all(m.fp8_meta["state"].fp8_format is Format.HYBRID for m in modules)
        under.install()
        under.apply(everything(under, Option.uniform("mxfp8")))
        losses(model)
        assert all(m.fp8_meta["state"].fp8_format is Format.E4M3 for m in modules)


def test_what_a_checkpoint_brought_along_is_forgotten() -> None:
    model = build()
    under = PlannedModel([model], Topology(), seed=0)
    for module in by_name(under).values():
        module.fp8_meta.update(recipe=MXFP8BlockScaling(Format.HYBRID), state=MXFP8BlockScaling())
        module.fp8_meta_tensors_initialized = True
        module._fp8_workspaces["weight"] = object()
    under.install()
    for module in by_name(under).values():
        assert not module._fp8_workspaces and not module.fp8_meta_tensors_initialized
    under.uninstall()


def test_bf16_for_a_while() -> None:
    with planned() as (model, under):
        under.apply(plan(under, lambda name: CHOICES[name.rsplit(".", 1)[1]]))
        before = losses(model)
        with under.runtime.running(Mode.BF16):
            assert set().union(*step(model, under).values()) == {("bf16", "bf16", "bf16")}
        ran(under)
        assert losses(model) == before
        for name, seen in ran(under).items():
            assert seen == {words(CHOICES[name.rsplit(".", 1)[1]])}, name


def test_a_quantized_run_is_overridden_both_ways() -> None:
    with planned() as (model, under):
        under.apply(plan(under, lambda name: CHOICES[name.rsplit(".", 1)[1]]))
        with fp8_autocast(enabled=True, fp8_recipe=MXFP8BlockScaling()):
            for name, seen in step(model, under).items():
                assert seen == {words(CHOICES[name.rsplit(".", 1)[1]])}, name
            with under.runtime.running(Mode.BF16):
                assert set().union(*step(model, under).values()) == {("bf16",) * 3}
        under.uninstall()
        with fp8_autocast(enabled=True, fp8_recipe=MXFP8BlockScaling()):
            assert set().union(*step(model, under).values()) == {("mxfp8",) * 3}


def test_evaluations_run_the_plan() -> None:
    with planned() as (model, under):
        under.apply(everything(under, Option.uniform("nvfp4")))
        model.eval()
        with torch.no_grad():
            losses_of = step(model, under)
        assert set().union(*losses_of.values()) == {("nvfp4",) * 3}


def test_recomputed_forwards_run_the_plan() -> None:
    with planned() as (model, under):
        under.apply(plan(under, lambda name: CHOICES[name.rsplit(".", 1)[1]]))
        plain = gradients(model)
    recompute = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    with planned(**recompute) as (model, under):
        under.apply(plan(under, lambda name: CHOICES[name.rsplit(".", 1)[1]]))
        ran(under)
        model.zero_grad()
        again = gradients(model)
        for name, module in by_name(under).items():
            assert len(module.seen) == 4  # two microbatches, each of them twice
            assert set(module.seen) == {words(CHOICES[name.rsplit(".", 1)[1]])}
    assert all(map(torch.equal, plain, again))


def test_undoing_gives_everything_back() -> None:
    model = build()
    under = PlannedModel([model], Topology(), seed=0)
    modules = list(by_name(under).values())
    theirs = [object() for _ in modules]
    for module, params in zip(modules, theirs, strict=True):
        module.te_quant_params = params
    under.install()
    under.install()
    under.apply(everything(under, Option.uniform("mxfp8")))
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules]
    assert hooks == [2] * 8
    under.uninstall()
    under.uninstall()
    for module, params in zip(modules, theirs, strict=True):
        assert module.te_quant_params is params
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert "set_is_first_microbatch" not in model.__dict__


def test_plans_before_the_seam_is_installed_wait() -> None:
    model = build()
    under = PlannedModel([model], Topology(), seed=0)
    under.apply(everything(under, Option.uniform("mxfp8")))
    assert set().union(*step(model, under).values()) == {("bf16",) * 3}
    under.install()
    assert set().union(*step(model, under).values()) == {("mxfp8",) * 3}
    under.uninstall()


def test_a_precision_file_gives_way_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = build()
    under = PlannedModel([model], Topology(), seed=0)
    for module in by_name(under).values():
        module.te_quant_params = extension.TEQuantizationParams(
            extension.TEQuantizationRecipe(), None
        )
    with caplog.at_level(logging.WARNING):
        under.install()
    told = [record.getMessage() for record in caplog.records if "megatron_snip" in record.name]
    assert told == ["plans take the place of --te-precision-config-file"]
    under.uninstall()


def test_experts_of_a_grouped_linear_share_an_option() -> None:
    with planned(grouped=True, fp8="e4m3", fp8_recipe="mxfp8", **EXPERTS) as (model, under):
        under.apply(plan(under, lambda name: "mxfp8" if name.endswith("fc1") else "bf16"))
        for name, seen in step(model, under).items():
            assert seen == {words("mxfp8" if name.endswith("fc1") else "bf16")}, name


def test_what_linears_cannot_run_they_refuse() -> None:
    with planned() as (_, under):
        linear = under.linears[0]
        assert linear.refusal(BF16) is None
        assert linear.refusal(Option.parse("nvfp4-mxfp8-bf16")) is None
        reason = linear.refusal(Option.uniform("mxfp4"))
        assert reason is not None and "no MXFP4 recipe" in reason
    with planned(grouped=True, fp4="e2m1", **EXPERTS) as (_, under):
        grouped = [p for p in under.linears if p.placement.expert is not None]
        for linear in grouped:
            assert linear.refusal(Option.uniform("nvfp4")) is None
            reason = linear.refusal(Option.parse("nvfp4-mxfp8-bf16"))
            assert reason is not None and "one format for all three GEMMs" in reason
    with planned(hidden_size=72, num_attention_heads=2) as (_, under):
        reason = under.linears[0].refusal(Option.uniform("mxfp8"))
        assert reason is not None and "not a multiple of 32" in reason


def test_gathered_inputs_have_no_more_bits_in_wgrad_than_in_fprop() -> None:
    """Transformer Engine makes the columns of a gathered input from the rows of its shards."""
    finer = ("nvfp4-mxfp8-bf16", "nvfp4-mxfp8-mxfp8", "mxfp8-nvfp4-bf16")
    others = ("mxfp8", "nvfp4", "nvfp4-mxfp8-nvfp4", "bf16-mxfp8-nvfp4", "mxfp8-nvfp4-nvfp4")
    with planned() as (_, under):
        for linear in under.linears:
            for text in (*finer, *others):
                assert linear.refusal(Option.parse(text)) is None
            module: Any = linear.module
            module.sequence_parallel = True
            for text in others:
                assert linear.refusal(Option.parse(text)) is None
            for text in finer:
                reason = linear.refusal(Option.parse(text))
                assert (reason is None) == (linear.placement.kind == "row")
                if reason is not None:
                    assert "wgrad cannot have more bits than fprop" in reason


@pytest.mark.parametrize("flag", ["ub_overlap_ag_fprop", "ub_overlap_rs_dgrad", "ub_bulk_wgrad"])
def test_overlapped_communication_is_refused(flag: str) -> None:
    model = build()
    setattr(model.decoder.layers[1].mlp.linear_fc1, flag, True)
    with pytest.raises(
        UnsupportedError, match=r"layers\.1\.mlp\.linear_fc1.*drop --tp-comm-overlap"
    ):
        PlannedModel([model], Topology(), seed=0)


def test_people_read_what_runs() -> None:
    with planned() as (_, under):
        under.apply(plan(under, lambda name: CHOICES[name.rsplit(".", 1)[1]]))
        told = {linear.placement.name.rsplit(".", 1)[1]: linear.recipe for linear in under.linears}
        assert told == {
            "linear_qkv": "mxfp8",
            "linear_proj": "nvfp4",
            "linear_fc1": "custom(nvfp4, mxfp8, bf16)",
            "linear_fc2": "bf16",
        }

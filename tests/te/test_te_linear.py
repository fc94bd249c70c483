"""Options on Transformer Engine's linears: set between iterations, run by the next forward."""

import pickle
from functools import partial
from typing import Any

import pytest
import torch
import transformer_engine_torch as tex
from megatron.core.extensions import transformer_engine as extension
from transformer_engine.common.recipe import Format, MXFP8BlockScaling
from transformer_engine.pytorch.module import base as te_base
from transformer_engine.pytorch.module import grouped_linear as te_grouped
from transformer_engine.pytorch.module import linear as te_linear
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, fp8_autocast

from megatron_snip.errors import UnsupportedError
from megatron_snip.linears.model import PlannedModel
from megatron_snip.linears.te import quantizers
from megatron_snip.linears.te.fresh_weights import FreshWeights
from megatron_snip.linears.te.linear import RecipeTELinear
from megatron_snip.options import Option
from megatron_snip.topology import Topology
from tests.models import (
    EXPERTS,
    FP32,
    Choice,
    assignment,
    batches,
    build,
    by_name,
    forward_step,
    losses,
    planned,
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


def under_plan(choice: Choice = "bf16", **changes: Any) -> tuple[Any, PlannedModel]:
    model = build(**changes)
    return model, planned(model, choice)


def choices_of(kinds: dict[str, str]) -> Choice:
    return lambda name: kinds[name.rsplit(".", 1)[1]]


def runs(model: Any, under: PlannedModel, choice: Choice) -> bool:
    """Whether the GEMMs of each linear run a plan in a step."""
    modules = by_name(under)
    for module in modules.values():
        module.seen.clear()
    assert len(losses(model)) == 2
    wanted = {name: {option.formats} for name, option in assignment(under, choice).items()}
    return wanted == {name: set(module.seen) for name, module in modules.items()}


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
    under = planned(model)
    assert all(isinstance(linear, RecipeTELinear) for linear in under.linears)
    assert equal(results(model), plain)
    assert getattr(FP8GlobalStateManager, "entered", 0) == 0


def test_every_linear_runs_its_option_from_the_next_step_on() -> None:
    model, under = under_plan()
    kinds = (CHOICES, OTHERS, CHOICES, dict.fromkeys(CHOICES, "bf16"), OTHERS)
    by_layer = lambda name: "nvfp4" if ".layers.1." in name else "bf16"  # noqa: E731
    for choice in (by_layer, *map(choices_of, kinds)):
        under.apply(assignment(under, choice))
        assert runs(model, under, choice)
    builds = [module.num_builds for module in by_name(under).values()]
    under.apply(assignment(under, choice))
    losses(model)  # quantizers are reused while an option stays
    assert [module.num_builds for module in by_name(under).values()] == builds


def test_a_new_option_needs_no_first_microbatch() -> None:
    """Recipes that differ by their factory alone have one class; cached weights must go."""

    def loss(model: Any) -> float:
        with torch.no_grad():  # outside of Megatron's schedules no microbatch is marked
            output, _ = forward_step(batches(), model)
        return float(output.mean())

    model, under = under_plan("nvfp4-mxfp8-bf16")
    before = [loss(model), loss(model)]
    under.apply(assignment(under, "mxfp8-nvfp4-bf16"))
    changed = loss(model)
    assert loss(under_plan("mxfp8-nvfp4-bf16")[0]) == changed
    assert before[0] == before[1] != changed


def te_params(**fields: Any) -> Any:
    """Megatron's own recipe of a module in a BF16 run."""
    recipe = extension.TEQuantizationRecipe(
        fp8_quantization_recipe="mxfp8", override_nonquantized_autocast=True, **fields
    )
    return extension.TEQuantizationParams(recipe, None)


def test_a_recipe_of_the_same_class_is_replaced() -> None:
    """Transformer Engine reuses quantizers by the recipe's class, whatever else differs."""
    model = build()
    under = PlannedModel([model], Topology(), seed=0)
    modules = by_name(under).values()
    for fp8_format in ("hybrid", "e4m3"):  # Megatron alone: the second changes nothing
        for module in modules:
            module.te_quant_params = te_params(fp8_format=fp8_format)
        losses(model)
        assert all(m.fp8_meta["scaling_fwd"].recipe.fp8_format is Format.HYBRID for m in modules)
    under.install()
    under.apply(assignment(under, "mxfp8"))
    losses(model)
    assert all(m.fp8_meta["scaling_fwd"].recipe.fp8_format is Format.E4M3 for m in modules)


def test_the_plan_overrides_a_quantized_run_and_bf16_both() -> None:
    choice = choices_of(CHOICES)
    model, under = under_plan(choice)
    before = losses(model)
    with under.runtime.running_in_bf16():
        assert runs(model, under, "bf16")
    assert losses(model) == before
    with fp8_autocast(enabled=True, fp8_recipe=MXFP8BlockScaling()):
        assert runs(model, under, choice)
        with under.runtime.running_in_bf16():
            assert runs(model, under, "bf16")
        under.uninstall()
        assert runs(model, under, "mxfp8")


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_attention_in_fp8_keeps_the_run_s_recipe(recipe: str) -> None:
    """Whatever recipe the linears around it have: attention finds the autocast of the run."""
    fp8_attention = {"fp8_dot_product_attention": True, "fp8_multi_head_attention": True}
    model = build(fp8="hybrid", fp8_recipe=recipe, **fp8_attention)
    seen: list[tuple[str, bool, bool]] = []

    def attend(original: Any, *args: Any, **kwargs: Any) -> Any:
        assert FP8GlobalStateManager.is_fp8_enabled()
        found = FP8GlobalStateManager.get_fp8_recipe()
        seen.append((repr(found), found.fp8_dpa, found.fp8_mha))
        with fp8_autocast(enabled=False):  # a CPU has no kernel for attention in FP8
            return original(*args, **kwargs)

    for layer in model.decoder.layers:
        attention = layer.self_attention.core_attention
        attention.forward = partial(attend, attention.forward)
    losses(model)  # the job alone
    in_the_job = seen.copy()
    # Megatron gives `--fp8-multi-head-attention` to delayed scaling alone.
    assert [flags for _, *flags in seen] == [[True, recipe == "delayed"]] * 4
    under = planned(model)
    for choice in ("fp8", "bf16", choices_of(CHOICES), choices_of(OTHERS)):
        seen.clear()
        under.apply(assignment(under, choice))
        losses(model)
        assert seen == in_the_job


def test_recomputed_forwards_run_the_plan() -> None:
    recompute = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    found = []
    for changes in ({}, recompute):
        model, under = under_plan(choices_of(CHOICES), **changes)
        found.append(results(model))
        assert runs(model, under, choices_of(CHOICES))
    assert equal(*found)


def test_a_recomputed_forward_finds_no_nvfp4_weight_without_columns() -> None:
    """Before 2.12 Transformer Engine would reuse one, and fail."""
    model, under = under_plan("nvfp4", recompute_modules=["mlp"], recompute_granularity="selective")
    without_columns: dict[bool, int] = {False: 0, True: 0}

    def before_forward(module: Any, _: Any) -> None:
        weights = module._fp8_workspaces.values()
        num = sum(weight._columnwise_data is None for weight in weights)
        without_columns[torch.is_grad_enabled()] += num

    def after_forward(module: Any, *_: Any) -> None:
        if not torch.is_grad_enabled():
            before_forward(module, None)

    for module in by_name(under).values():
        module.register_forward_pre_hook(before_forward)
        module.register_forward_hook(after_forward)
    losses(model)
    assert without_columns[False] > 0  # there were some to be found
    assert without_columns[True] == 0


def test_a_checkpoint_names_the_factory_of_a_custom_recipe() -> None:
    """Transformer Engine pickles a custom recipe into the state, and none of its own recipes."""
    model, under = under_plan(choices_of(CHOICES))
    losses(model)
    state = model.state_dict()
    for name in by_name(under):
        held = state[f"{name}._extra_state"].numpy().tobytes()
        assert bool(held) == name.endswith("linear_fc1")
        if held:
            assert pickle.loads(held)["recipe"].qfactory is quantizers.nvfp4_mxfp8_bf16
    before = losses(model)
    model.load_state_dict(state)
    assert losses(model) == before


def test_uninstalling_restores_every_module() -> None:
    model = build()
    modules = list(by_name(PlannedModel([model], Topology(), seed=0)).values())
    theirs = [te_params() for _ in modules]
    for module, params in zip(modules, theirs, strict=True):
        module.te_quant_params = params
    under = PlannedModel([model], Topology(), seed=0)
    under.apply(assignment(under, "nvfp4"))
    assert runs(model, under, "mxfp8")  # not installed yet
    under.install()
    under.install()
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules] == [2] * 8
    assert runs(model, under, "nvfp4")
    under.uninstall()
    under.uninstall()
    for module, params in zip(modules, theirs, strict=True):
        assert module.te_quant_params is params
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert not module._fp8_workspaces
    assert runs(model, under, "mxfp8")
    assert "set_is_first_microbatch" not in model.__dict__


@pytest.mark.parametrize("option", ["nvfp4-mxfp8-bf16", "mxfp8-nvfp4-nvfp4", "bf16-bf16-mxfp8"])
def test_grouped_experts_run_options_that_differ_by_gemm(option: str) -> None:
    choice = lambda name: option if ".experts." in name else "bf16"  # noqa: E731
    model, under = under_plan(choice, grouped=True, fp4="e2m1", **EXPERTS)
    assert runs(model, under, choice)
    assert not any(linear.refusal(Option.parse(option)) for linear in under.linears)


def test_grouped_experts_of_older_releases_refuse_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(te_grouped, "HybridQuantizer")
    _, under = under_plan(grouped=True, fp4="e2m1", **EXPERTS)
    for linear in (p for p in under.linears if len(p.placements) > 1):
        assert linear.refusal(Option.uniform("nvfp4")) is None
        refusal = linear.refusal(Option.parse("nvfp4-mxfp8-bf16"))
        assert "2.20.2 takes one format for all three GEMMs of grouped experts" in str(refusal)


def gathering(with_norm: bool) -> RecipeTELinear:
    """A column-parallel linear as it is on one of two ranks under sequence parallelism."""
    model, under = under_plan()
    linear = next(each for each in under.linears if each.placements[0].kind == "column")
    if not with_norm:
        plain = extension.TEColumnParallelLinear(
            64,
            32,
            config=model.config,
            init_method=torch.nn.init.zeros_,
            gather_output=False,
            bias=False,
            skip_bias_add=True,
            is_expert=False,
        ).bfloat16()
        linear = RecipeTELinear(plain, linear.placements, under.runtime, under.job.machine)
    linear.module.sequence_parallel = True
    return linear


LOSES_BITS = "wgrad needs fprop's format or one of fewer bits"
FAILS = "cannot gather an input that is nvfp4 in wgrad alone"
GATHERED = {  # option -> what refuses it with a fused norm, and without one
    "mxfp8": ("", ""),
    "nvfp4": ("", ""),
    "nvfp4-mxfp8-nvfp4": ("", ""),
    "mxfp8-nvfp4-nvfp4": ("", ""),
    "bf16-nvfp4-nvfp4": ("", ""),
    "bf16-mxfp8-mxfp8": ("", ""),
    "nvfp4-mxfp8-bf16": (LOSES_BITS, ""),
    "nvfp4-nvfp4-mxfp8": (LOSES_BITS, ""),
    "mxfp8-mxfp8-bf16": (LOSES_BITS, ""),
    "mxfp8-nvfp4-bf16": (LOSES_BITS, LOSES_BITS),
    "fp8_tensorwise-mxfp8-bf16": (LOSES_BITS, LOSES_BITS),
    "fp8_tensorwise-mxfp8-mxfp8": (LOSES_BITS, LOSES_BITS),
    "mxfp8-mxfp8-fp8_tensorwise": (LOSES_BITS, ""),
    "fp8_tensorwise-mxfp8-nvfp4": ("", ""),
    "mxfp8-mxfp8-nvfp4": ("", FAILS),
    "bf16-mxfp8-nvfp4": ("", FAILS),
    "mxfp8-bf16-nvfp4": ("", FAILS),
    "bf16-bf16-nvfp4": ("", FAILS),
}


@pytest.mark.parametrize("with_norm", [True, False])
def test_what_a_gathered_input_cannot_be(with_norm: bool) -> None:
    """Transformer Engine makes wgrad's input from what it kept of fprop's or of wgrad's."""
    linear = gathering(with_norm)
    for text, wanted in GATHERED.items():
        reason = linear.refusal(Option.parse(text)) or ""
        assert wanted[not with_norm] in reason and bool(reason) == bool(wanted[not with_norm])
    linear.module.sequence_parallel = False
    assert not any(linear.refusal(Option.parse(text)) for text in GATHERED)


def test_scales_per_token_cannot_be_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine shares no amax of a row: "does not support amax reduction"."""
    monkeypatch.setenv("NVTE_NVFP4_ROW_SCALED_ACTIVATION", "1")
    monkeypatch.setenv("NVTE_NVFP4_DISABLE_RHT", "1")
    linear = gathering(with_norm=True)
    for text in ("nvfp4", "nvfp4-mxfp8-nvfp4", "mxfp8-nvfp4-nvfp4"):
        wanted = "cannot gather an input with one FP32 scale per token (NVTE_NVFP4_ROW_SCALED"
        assert wanted in str(linear.refusal(Option.parse(text)))
    assert linear.refusal(Option.parse("mxfp8-nvfp4-mxfp8")) is None
    linear.module.sequence_parallel = False
    assert linear.refusal(Option.parse("nvfp4")) is None


def test_row_parallel_linears_gather_no_input() -> None:
    linears = under_plan()[1].linears
    linear = next(each for each in linears if each.placements[0].kind == "row")
    linear.module.sequence_parallel = True
    assert not any(linear.refusal(Option.parse(text)) for text in GATHERED)


def test_nvfp4_in_an_fp32_run_is_refused() -> None:
    """Transformer Engine raises in the first forward: "RHT is only supported for bfloat16"."""
    for linear in under_plan(**FP32)[1].linears:
        for text in ("nvfp4", "nvfp4-mxfp8-bf16", "bf16-mxfp8-nvfp4"):
            assert "nvfp4 needs BF16 and got float32; add --bf16" in str(
                linear.refusal(Option.parse(text))
            )
        assert linear.refusal(Option.parse("mxfp8")) is None


@pytest.mark.parametrize(
    ("option", "buffers", "asked"),
    [
        ("mxfp8", ("FP8", "NONE"), True),
        ("bf16", ("FP8", "NONE"), False),
        ("nvfp4", ("FP8", "NONE"), None),
        ("mxfp8-bf16-bf16", ("FP8", "NONE"), None),
        ("mxfp8", ("NONE",), None),
    ],
)
def test_communication_overlaps_where_the_option_has_a_buffer(
    monkeypatch: pytest.MonkeyPatch, option: str, buffers: tuple[str, ...], asked: bool | None
) -> None:
    """Transformer Engine looks the buffer up in the forward; a missing one is an error there."""

    class Asked(Exception):
        """Ends the forward: no buffer is behind it."""

    def get_ub(name: str, use_fp8: bool) -> Any:
        raise Asked(name, use_fp8)

    modes = te_base.UserBufferQuantizationMode
    found = {("fc2_fprop", modes[name]): None for name in buffers}
    monkeypatch.setattr(te_base, "_ub_communicators", found)
    for module in (te_base, te_linear):
        monkeypatch.setattr(module, "get_ub", get_ub)
    model = build(params_dtype=torch.bfloat16, bf16=True)
    fc2 = model.decoder.layers[1].mlp.linear_fc2
    fc2.ub_overlap_rs_fprop = True
    fc2.ub_name = "fc2"
    under = planned(model, option)
    if asked is None:
        losses(model)
    else:
        with pytest.raises(Asked) as error:
            losses(model)
        assert error.value.args == ("fc2_fprop", asked)
    under.uninstall()
    assert fc2.ub_overlap_rs_fprop


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
        model, _ = under_plan("mxfp8")
        for _ in range(steps_before):
            losses(model)
        scale(model)
        found.append(losses(model))
    assert found[0] == found[1]
    model = build()
    for module in by_name(PlannedModel([model], Topology(), seed=0)).values():
        module.te_quant_params = te_params()
    losses(model)
    scale(model)
    assert losses(model) != found[0]


def test_microbatches_of_a_step_share_quantized_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model, under = under_plan("mxfp8")
    weights = {module.weight.data_ptr() for module in by_name(under).values()}
    made = []
    original = tex.quantize

    def count(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        made.append(tensor.data_ptr())
        return original(tensor, *args, **kwargs)

    monkeypatch.setattr(tex, "quantize", count)
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

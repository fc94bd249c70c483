"""What the job's own rules fix, and which formats and target `auto` takes beside them."""

from typing import Any

import pytest
import torch

from megatron_snip.config import SnipConfig
from megatron_snip.errors import UsageError
from megatron_snip.linears.model import PlannedModel
from megatron_snip.log import forget_warnings
from megatron_snip.options import BF16, Option
from megatron_snip.planning.fixed import Source
from megatron_snip.planning.planner import make_plan
from megatron_snip.run.controller import SnipController
from megatron_snip.topology import Topology
from tests.distributed.small_model import Memory
from tests.models import EXPERTS, build, losses, ran, recipe_file, resolved, run_plans

MXFP8 = {"fp8": "e4m3", "fp8_recipe": "mxfp8"}
TENSORWISE = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
NVFP4 = {"fp4": "e2m1", "fp4_recipe": "nvfp4"}
EDGES = {
    "first_last_layers_bf16": True,
    "num_layers_at_start_in_bf16": 1,
    "num_layers_at_end_in_bf16": 1,
}
FP8, FP4 = map(Option.uniform, ("fp8", "fp4"))


ATTENTION = {"*.linear_qkv": "bf16", "*.linear_proj": "bf16", "mtp.*": "bf16"}
"""As in NVIDIA's file for Nemotron 3 Super."""


def fixed(model: Any, **settings: Any) -> dict[str, tuple[str, Source]]:
    plans = run_plans(model, 1024, **settings)
    return {n: (str(each.option), each.source) for n, each in plans.available.fixed.items()}


@pytest.mark.parametrize("run", [{}, MXFP8, NVFP4], ids=["bf16", "mxfp8", "nvfp4"])
def test_linears_that_a_file_keeps_in_bf16_stay_so_in_every_plan(run: dict[str, Any]) -> None:
    model = build(mtp_num_layers=1, quant_recipe=recipe_file(ATTENTION), **run)
    plans = run_plans(model, 1024)
    kept = {
        each.name
        for each in PlannedModel([model], Topology(), 7).job.linears
        if "self_attention" in each.name or each.name.startswith("mtp.")
    }
    found = plans.available.fixed
    assert set(found) == kept and len(kept) == 8
    assert {each.source for each in found.values()} == {Source.FILE}
    problem = plans.available.problem_without_measurements(plans.targets.at(1))
    plan = make_plan(problem, plans.plan_settings(0))
    assert {plan.linears[name] for name in kept} == {BF16}
    assert plan.efficiency > 0
    free = set(plan.linears) - kept
    assert fixed(model, pins="*=free") == {}
    pinned = fixed(model, pins="*.1.*.linear_qkv=fp8")
    assert pinned["decoder.layers.1.self_attention.linear_qkv"] == ("fp8", Source.PIN)
    assert len(pinned) == 8 and not free & set(pinned)


def test_a_linear_that_a_file_gives_another_recipe_keeps_that() -> None:
    """Also one that is no option of the run."""
    recipe = {
        "fp8_quantization_recipe": "tensorwise",
        "override_quantized_autocast": True,
        "override_nonquantized_autocast": True,
    }
    rules = {"*.linear_fc1": "tensorwise"}
    model = build(quant_recipe=recipe_file(rules, tensorwise=recipe), **MXFP8)
    plans = run_plans(model, 1024)
    assert plans.config.formats == ("fp8", "fp4")
    problem = plans.available.problem_without_measurements(plans.targets.at(1))
    plan = make_plan(problem, plans.plan_settings(0))
    under = PlannedModel([model], Topology(), 7)
    under.install()
    under.apply(plan.linears)
    losses(model)
    for linear in under.linears:
        if linear.name.endswith("linear_fc1"):
            assert set(linear.module.seen) == {("tensorwise",) * 3}
    assert ("nvfp4",) * 3 in ran(under)


def test_a_rule_goes_before_the_first_and_last_layers_and_unused_ones_are_named() -> None:
    recipe = {"fp8_quantization_recipe": "mxfp8", "override_nonquantized_autocast": True}
    rules = {
        "decoder.layers.0.mlp.linear_fc1": "mxfp8",
        "*.layers.7.*": "bf16",
        "*.linear_fc1": "bf16",
        "decoder.layers.1.mlp.linear_fc1": "mxfp8",  # an earlier rule decides
    }
    model = build(num_layers=3, quant_recipe=recipe_file(rules, mxfp8=recipe), **MXFP8, **EDGES)
    plans = run_plans(model, 1024)
    sources = {name: each.source for name, each in plans.available.fixed.items()}
    assert sources == {
        **{f"decoder.layers.{i}.{m}": Source.EDGE for i in (0, 2) for m in LAYER if "fc1" not in m},
        **{f"decoder.layers.{i}.mlp.linear_fc1": Source.FILE for i in range(3)},
    }
    assert str(plans.available.fixed["decoder.layers.0.mlp.linear_fc1"].option) == "fp8"
    assert any(
        "2 rules of --te-precision-config-file decide for no module of any rank: "
        "*.layers.7.* (bf16), decoder.layers.1.mlp.linear_fc1 (mxfp8)" in text
        for text in plans.available.warnings
    )


LAYER = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1")
LAYER += ("mlp.linear_fc2",)

STORED = {
    "tensorwise, edge layers": ({**TENSORWISE, "fp8_param": True, **EDGES}, ("bf16", "fp8")),
    "mxfp8, edge layers": ({**MXFP8, "fp8_param": True, **EDGES}, ("bf16", "fp8")),
    "nvfp4, edge layers": ({**NVFP4, "fp4_param": True, **EDGES}, ("bf16", "fp4")),
    "nvfp4, multi-token prediction": (
        {**NVFP4, "fp4_param": True, "mtp_num_layers": 1},
        ("bf16", "fp4"),
    ),
}


@pytest.mark.parametrize("name", list(STORED))
def test_auto_takes_formats_that_linears_with_stored_weights_can_choose_from(name: str) -> None:
    """The BF16 weights of edge layers could run every format, and do not."""
    settings, formats = STORED[name]
    model = build(num_layers=4, ffn_hidden_size=128, **settings)
    plans = run_plans(model, 1024)
    assert plans.config.formats == formats
    target = plans.config.efficiency_target
    problem = plans.available.problem_without_measurements(target)
    free = [row for row in problem.linears if row.name not in plans.available.fixed]
    assert free and all(len(row.options) == 2 for row in free)
    reachable = sum(row.flops for row in free) / sum(row.flops for row in problem.linears)
    assert target == pytest.approx(0.75 * reachable, abs=1e-6)
    assert plans.first_plan(None, 0).plan.target <= target
    assert make_plan(problem, plans.plan_settings(0)).efficiency >= target


@pytest.mark.parametrize("explicit", [{}, {"efficiency_target": 0.5}])
def test_a_refused_target_names_the_formats_and_the_pins_that_help(
    explicit: dict[str, Any],
) -> None:
    model = build(num_layers=4, ffn_hidden_size=128, fp8_param=True, **TENSORWISE, **EDGES)
    wanted = r"--snip-formats bf16,fp8 reaches 0\.5; --snip-pins 'GLOB=free' gives linears back"
    with pytest.raises(UsageError, match=wanted):
        run_plans(model, 1024, formats=("fp8", "fp4"), **explicit).first_plan(None, 0)


def test_experts_that_cannot_run_nvfp4_leave_the_choice_between_bf16_and_fp8(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Their tokens are padded to 32 in an MXFP8 job; they have most of the FLOPs."""
    experts = {**EXPERTS, "moe_ffn_hidden_size": 128}
    forget_warnings()
    with caplog.at_level("INFO", "megatron_snip"):
        assert resolved(build(grouped=True, **MXFP8, **experts)).formats == ("bf16", "fp8")
    (line,) = [text for text in caplog.messages if text.startswith("snip: formats auto")]
    assert "bf16,fp8 (backend te): of the FLOPs that nothing fixes only" in line
    assert "experts' tokens are padded to 32" in line
    assert resolved(build(**MXFP8)).formats == ("fp8", "fp4")


def test_a_file_that_fixes_every_linear_leaves_nothing_to_plan() -> None:
    model = build(quant_recipe=recipe_file({"*": "bf16"}), **MXFP8)
    wanted = r"nothing is left to plan .*8 of 8 linears are fixed: 8 by --te-precision-config-file"
    with pytest.raises(UsageError, match=wanted):
        run_plans(model, 1024)
    assert run_plans(model, 1024, pins="*.mlp.*=free").config.efficiency_target < 0.75


def test_what_is_fixed_is_logged_and_recorded(caplog: pytest.LogCaptureFixture) -> None:
    model = build(quant_recipe=recipe_file(ATTENTION), **MXFP8)
    memory = Memory()
    optimizer = torch.optim.SGD(model.parameters())
    config = SnipConfig(plan_file=None, collect_only=True, start_step=5)
    with caplog.at_level("INFO", "megatron_snip"):
        run = SnipController(
            config, [model], optimizer, topology=Topology(), seed=7, writers=[memory]
        )
    run.close()
    example = "decoder.layers.0.self_attention.linear_qkv=bf16"
    source = "--te-precision-config-file"
    assert f"4 of 8 linears are fixed: 4 by {source} (such as {example})" in caplog.text
    assert memory.settings[0][1].fixed == {source: {"linears": 4, "example": example}}
    resolved_plan = memory.applied[0][1].resolved
    assert resolved_plan is not None
    in_files = {row.name: row.fixed for row in resolved_plan.linears}
    assert {name for name, source in in_files.items() if source} == {
        name for name in in_files if "self_attention" in name
    }

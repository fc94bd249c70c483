"""A low precision of the recipe's own, and CUDA graphs, on Transformer Engine's linears."""

import json
from pathlib import Path

import pytest

from tests.bridge.lab import CURRENT_SCALING, OF_JOB, Lab, losses, of_job, weights
from tests.megatron.lab import applied_plans, snip_lines
from tests.processes import run_python

SNIP = ["--snip", "--snip-interval", "4", "--snip-start-step", "3", "--snip-lag", "2"]
PLANS = [*OF_JOB, *SNIP, "--snip-efficiency-target", "0.25"]
COLLECT_ONLY = [*PLANS, "--snip-collect-only"]


def test_measuring_beside_the_recipes_own_precision_changes_no_bit(lab: Lab) -> None:
    plain = lab.run("llama-tp2", OF_JOB, of_job(), plain=True)
    measured = lab.run("llama-tp2", COLLECT_ONLY, of_job())
    assert weights(measured) == weights(plain)
    assert losses(measured) == losses(plain)


def test_plans_start_from_what_the_recipe_runs_and_respect_its_bf16_layers(lab: Lab) -> None:
    run = lab.run("llama-tp2", PLANS, of_job())
    run.finished()
    assert applied_plans(run) == [5, 9], run.report
    recipes = recipes_of(run.output, 1)
    edges = {name for name in recipes if ".layers.0." in name or ".layers.3." in name}
    own = "decoder.layers.1.mlp.linear_fc2"  # by `quant_recipe`
    in_fp8 = recipes.keys() - edges - {own}
    assert len(edges) == 8 and len(in_fp8) == 7
    assert {recipes[name] for name in in_fp8} == {"tensorwise_hybrid"}
    assert {recipes[name] for name in (*edges, own)} == {"bf16"}
    recipes = recipes_of(run.output, 5)
    assert {recipes[name] for name in (*edges, own)} == {"bf16"} != set(recipes.values())
    assert fixed_in(run.output, 5) == {
        **dict.fromkeys(edges, "--first-last-layers-bf16"),
        own: "--te-precision-config-file",
    }
    lines = "\n".join(snip_lines(run))
    assert "8 by mixed_precision.first_last_layers_bf16 (such as decoder.layers.0." in lines
    assert f"1 by model.quant_recipe (such as {own}=bf16)" in lines


def test_stored_weights_with_bf16_edges_start_with_formats_that_leave_a_choice(lab: Lab) -> None:
    """As `mixed_precision=bf16_with_fp8_current_scaling_mixed` sets them, without a target."""
    words = [*OF_JOB, *SNIP]
    run = lab.run("llama-tp2", words, {"TINY_PRECISION": CURRENT_SCALING, "TINY_STORED": "1"})
    run.finished()
    assert applied_plans(run) == [5, 9], run.report
    lines = "\n".join(snip_lines(run))
    assert "formats auto: bf16,fp8 (backend te): of the FLOPs that nothing fixes only 0 %" in lines
    assert "the efficiency target is 0.375, 0.75 of the 0.5 " in lines
    assert set(recipes_of(run.output, 5).values()) == {"bf16", "tensorwise_hybrid"}
    refused = lab.run(
        "llama-tp2",
        [*words, "--snip-formats", "fp8,fp4"],
        {"TINY_PRECISION": CURRENT_SCALING, "TINY_STORED": "1"},
    )
    assert refused.statuses == (2, 2), refused.report
    (line,) = [x for x in refused.logs[0].splitlines() if x.startswith("megatron-snip: error: ")]
    assert "--snip-formats bf16,fp8 reaches 0.5" in line
    assert "mixed_precision.first_last_layers_bf16" in line


def fixed_in(output: Path, iteration: int) -> dict[str, str]:
    rows = json.loads((output / "precision" / f"{iteration}.json").read_text())["linears"]
    return {row["name"]: row["fixed"] for row in rows if row["fixed"] is not None}


def test_an_evaluation_that_no_recipe_can_run_runs_in_bf16(lab: Lab) -> None:
    """Training has 64 tokens, and evaluations 16: MXFP8 and NVFP4 need multiples of 32."""
    length = ["model.seq_length=16", "dataset.seq_length=16", "train.micro_batch_size=4"]
    sizes = ["validation.eval_global_batch_size=2", "validation.eval_micro_batch_size=1"]
    words = [*length, *sizes, *SNIP, "--snip-formats", "bf16,fp8", "--snip-eval-precision"]
    run = lab.run("llama-pp2", [*words, "plan"])
    truth = lab.run("llama-pp2", [*words, "bf16"])
    assert weights(run) == weights(truth)
    assert [r["evaluated"] for r in run.finished()] == [r["evaluated"] for r in truth.finished()]
    assert applied_plans(run) == [5, 9], run.report
    text = "evaluations run what the job itself runs, and not the plan"
    (line,) = [line for line in snip_lines(run) if text in line]
    assert "a multiple of 32 tokens on each rank, and a microbatch has 16" in line


def recipes_of(output: Path, iteration: int) -> dict[str, str]:
    """Recipe of each linear from an iteration on, as the run recorded it."""
    file = output / "precision" / f"{iteration}.json"
    return {row["name"]: row["recipe"] for row in json.loads(file.read_text())["linears"]}


GRAPHS = {
    "the iteration": (
        [
            *["model.cuda_graph_impl=full_iteration", "model.cuda_graph_warmup_steps=1"],
            *["rerun_state_machine.check_for_nan_in_loss=false", "ddp.check_for_nan_in_grad=false"],
        ],
        "captured the training step",
    ),
    "layers": (
        ["model.cuda_graph_impl=transformer_engine", "model.cuda_graph_warmup_steps=1"],
        "captured layers with 16 planned linears",
    ),
}


@pytest.mark.parametrize("captured", GRAPHS)
def test_plans_under_bridges_graphs_train_as_without(lab: Lab, captured: str) -> None:
    graphs, text = GRAPHS[captured]
    run = lab.run("llama-tp2", [*graphs, *PLANS], of_job())
    eager = lab.run("llama-tp2", PLANS, of_job())
    assert weights(run) == weights(eager), run.report
    assert losses(run) == losses(eager)
    assert sum(text in line for line in snip_lines(run)) == 2, run.report


PROBE = """
import json, os, sys
os.environ["WORLD_SIZE"] = "1"
from tests.bridge import script
from megatron.bridge.training.config import runtime_config_update
from megatron_snip.linears.te.job import is_bf16_layer
from megatron_snip.patches.incompatible import check_flags
from megatron_snip.patches.megatron_bridge.settings import settings_of
from tests.bridge.lab import ON_CPU
from tests.bridge.train_recipe import recipe_of
found = {}
for name in sys.argv[1:]:
    cfg = recipe_of(["llama", *ON_CPU.split()])
    cfg.mixed_precision = name
    runtime_config_update(cfg)
    args = settings_of(cfg)
    edges = [n for n in range(args.num_layers) if is_bf16_layer(args, "decoder", n)]
    flags = [row.flag for row in check_flags(args)]
    values = [getattr(args, x, None) for x in ("fp8", "fp8_recipe", "fp4", "fp4_recipe")]
    found[name] = [*values, flags, edges]
print("PROBE" + json.dumps(found))
"""

STORED = "--fp8-param-gather or --fp4-param-gather alone"
EDGES = [0, 3]
READ = {
    "bf16_mixed": [None, "tensorwise", None, "nvfp4", [], []],
    "bf16_with_fp8_delayed_scaling_mixed": ["hybrid", "delayed", None, "nvfp4", [STORED], []],
    CURRENT_SCALING: ["hybrid", "tensorwise", None, "nvfp4", [STORED], EDGES],
    "bf16_with_fp8_subchannel_scaling_mixed": ["hybrid", "blockwise", None, "nvfp4", [], []],
    "bf16_with_mxfp8_mixed": [
        *["e4m3", "mxfp8", None, "nvfp4"],
        *[["--fp8-param-gather with --reuse-grad-buf-for-mxfp8-param-ag"], []],
    ],
    "bf16_with_nvfp4_mixed": [None, "tensorwise", "e2m1", "nvfp4", [STORED], []],
}
"""Bridge's name -> Megatron-LM's fp8, fp8_recipe, fp4 and fp4_recipe, SNIP's rows, BF16 layers."""


def test_bridges_precisions_are_read_as_megatron_lms_flags(lab: Lab, tmp_path: Path) -> None:
    done = run_python("-c", PROBE, *READ)
    lines = [x for x in done.stdout.splitlines() if x.startswith("PROBE")]
    assert lines, done.stdout + done.stderr
    assert json.loads(lines[0].removeprefix("PROBE")) == READ

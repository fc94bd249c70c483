"""Beside a plain GPT: hybrid models with Mamba or Gated DeltaNet, MTP, latent attention, sparse
attention, context parallelism.

Transformer Engine's own Python runs (tests/te_on_cpu); the kernels of Mamba and of Gated DeltaNet
are stand-ins.
"""

import json

import pytest

from tests.megatron import lab as settings
from tests.megatron.lab import Lab, applied_plans, logged, recipes_of, weights

SIMULATE = ["--snip-backend", "simulate"]  # the machine has no tensor cores
SNIP, COLLECT_ONLY = [*settings.SNIP, *SIMULATE], [*settings.COLLECT_ONLY, *SIMULATE]

MIXER = ["mixer.in_proj", "mixer.out_proj"]
ATTENTION = ["self_attention.linear_qkv", "self_attention.linear_proj"]
MLP = ["mlp.linear_fc1", "mlp.linear_fc2"]
DENSE = [f"decoder.layers.{i}.{name}" for i in range(4) for name in ATTENTION + MLP]
HYBRID = [
    f"decoder.layers.{i}.{name}"
    for i, layer in enumerate((MIXER, ATTENTION, MLP, MIXER))
    for name in layer
]
DELTA_NET = [
    f"decoder.layers.{i}.{name}"
    for i, layer in enumerate(
        (["self_attention.in_proj", "self_attention.out_proj"], ATTENTION, MLP, ())
    )
    for name in layer
]
DELTA_NET += [name.replace("layers.0", "layers.3") for name in DELTA_NET[:2]]
LATENT = ["linear_q_down_proj", "linear_kv_down_proj", "linear_q_up_proj", "linear_kv_up_proj"]
LINEARS = {
    "cp2": DENSE,
    "hybrid": HYBRID,
    "hybrid-pp2": HYBRID,
    "delta-net": DELTA_NET,
    "mtp": DENSE + [f"mtp.layers.0.mtp_model_layer.{name}" for name in ATTENTION + MLP],
    "mtp-repeated": DENSE + [f"mtp.layers.0.mtp_model_layer.{name}" for name in ATTENTION + MLP],
    "latent": [
        f"decoder.layers.{i}.{name}"
        for i in range(4)
        for name in [*(f"self_attention.{n}" for n in [*LATENT, "linear_proj"]), *MLP]
    ],
}


@pytest.mark.parametrize("layout", LINEARS)
def test_all_linears_are_planned_and_measuring_changes_no_bit(te_lab: Lab, layout: str) -> None:
    lab = te_lab
    plain = lab.run(layout, plain=True)
    measured = lab.run(layout, COLLECT_ONLY)
    assert weights(measured) == weights(plain)
    assert [r["losses"] for r in measured.finished()] == [r["losses"] for r in plain.finished()]
    run = lab.run(layout, SNIP)
    assert applied_plans(run) == [5, 9], run.report
    assert logged(run)[4] == logged(measured)[4] and logged(run)[5] != logged(measured)[5]
    plan = json.loads((run.output / "plans" / "3.json").read_text())["linears"]
    assert list(plan) == LINEARS[layout]
    assert {gemms["fprop"] for gemms in plan.values()} == {"fp4", "fp8"}


def test_a_repeated_layer_of_multi_token_prediction_counts_at_every_depth(te_lab: Lab) -> None:
    run = te_lab.run("mtp-repeated", SNIP)
    linears = json.loads((run.output / "divergences" / "3.json").read_text())["linears"]
    for linear in linears:
        depths = 2 if linear["name"].startswith("mtp.") else 1
        row = linear["statistics"]
        assert row["flops_per_token"] == depths * 6 * row["in_features"] * row["out_features"]
        assert (row["microbatches"], row["tokens"]) == (4, depths * 256)


@pytest.mark.parametrize("layout", ["hybrid", "hybrid-aligned", "latent", "delta-net"])
def test_models_run_the_recipes_of_transformer_engine(te_lab: Lab, layout: str) -> None:
    """Measured and off they are bitwise the job's own; a plan's recipes train."""
    plain = te_lab.run(layout, plain=True)
    measured = te_lab.run(layout, settings.COLLECT_ONLY)
    off = te_lab.run(layout, [*settings.SNIP, "--snip-policy", "uniform-bf16"])
    for run in (measured, off):
        assert weights(run) == weights(plain)
        assert [r["losses"] for r in run.finished()] == [r["losses"] for r in plain.finished()]
    run = te_lab.run(layout, settings.SNIP)
    assert applied_plans(run) == [5, 9], run.report
    assert logged(run)[4] == logged(plain)[4] and logged(run)[5] != logged(plain)[5]
    recipes = recipes_of(run.output, 5)
    # Half of in_proj, 292 rows, is no multiple of 16.
    odd = {n for n in recipes if n.endswith("in_proj")} if layout == "hybrid" else set()
    assert {name for name, recipe in recipes.items() if recipe == "bf16"} == odd
    assert set(recipes.values()) - {"bf16"} == {"mxfp8", "nvfp4"}
    assert ("weight's shard (292, 128) is not a multiple of 32" in run.logs[0]) == bool(odd)


def test_a_linear_that_is_never_called_runs_as_in_the_job_and_is_said_once(te_lab: Lab) -> None:
    """Sparse attention multiplies the weight of `linear_kv_up_proj` itself."""
    plain = te_lab.run("dsa", plain=True)
    measured = te_lab.run("dsa", settings.COLLECT_ONLY)
    assert weights(measured) == weights(plain)
    run = te_lab.run("dsa", settings.SNIP)
    assert applied_plans(run) == [5, 9], run.report
    unused = {
        name: recipe
        for name, recipe in recipes_of(run.output, 5).items()
        if name.endswith("linear_kv_up_proj")
    }
    assert list(unused.values()) == ["bf16"] * 2
    text = "such as decoder.layers.0.self_attention.linear_kv_up_proj (frozen, or never called?)"
    # Nor does one reach the indexer, whose own loss is off.
    assert run.logs[0].count("no backward reached") == run.logs[0].count(text) == 1


def test_context_parallel_ranks_add_up_to_the_statistics_of_one(te_lab: Lab) -> None:
    tables = []
    for layout in ("te", "cp2"):
        run = te_lab.run(layout, [*COLLECT_ONLY, "--snip-start-step", "1"])
        run.finished()
        linears = json.loads((run.output / "divergences" / "1.json").read_text())["linears"]
        tables.append({linear["name"]: linear for linear in linears})
    one, two = tables
    for name, wanted in one.items():
        a, b = two[name]["statistics"], wanted["statistics"]
        assert (a["microbatches"], a["tokens"]) == (b["microbatches"], b["tokens"]) == (4.0, 256.0)
        for key in ("input_square", "weight_square", "grad_square"):
            assert a[key] == pytest.approx(b[key], rel=2e-3), (name, key)
        for form, errors in b["formats"].items():
            for key in ("input_error_square", "weight_error_square", "grad_error_square"):
                # Attention adds in another order, and rounds its scores to BF16.
                assert a["formats"][form][key] == pytest.approx(errors[key], rel=2e-2), (name, key)
        for option, values in wanted["options"].items():
            found = two[name]["options"][option]["quality_loss"]
            assert found == pytest.approx(values["quality_loss"], rel=0.1)

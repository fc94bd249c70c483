"""CUDA graphs in Megatron's own `pretrain`, imitated on the CPU."""

import pytest

from tests.distributed.launch import Run
from tests.megatron.fast_flags import GRAPH, GRAPHS
from tests.megatron.lab import COLLECT_ONLY, SNIP, Lab, logged, read_lines, snip_lines, weights


@pytest.mark.parametrize("layout", ["dp2", "pp2"])
def test_measuring_beside_a_graph_of_the_iteration_changes_no_bit(lab: Lab, layout: str) -> None:
    plain = lab.run(layout, GRAPH)
    assert weights(plain) == weights(lab.run(layout))
    collected = lab.run(layout, [*GRAPH, *COLLECT_ONLY])
    assert weights(collected) == weights(plain)
    assert logged(collected) == logged(plain)
    assert logged(collected, "grad norm") == logged(plain, "grad norm")
    assert sorted(p.name for p in (collected.output / "problems").iterdir()) == ["3.json", "7.json"]
    captured = [line for line in snip_lines(collected) if ": captured the " in line]
    assert ["training" in line for line in captured] == [True, False], captured


def test_simulated_linears_under_a_graph_are_measured_only(lab: Lab) -> None:
    run = lab.run("one", [*GRAPH, *SNIP])
    assert "SNIP measures and makes no plans" in run.report
    assert weights(run) == weights(lab.run("one"))


FP8 = ["--fp8-format", "e4m3", "--fp8-recipe", "mxfp8"]
PLANS = [*SNIP, "--snip-formats", "bf16,fp8"]
GENERATOR = "--te-rng-tracker"
"""Megatron sets it with graphs, and it draws other initial weights."""


def test_measuring_beside_graphs_of_hybrid_layers_changes_no_bit(te_lab: Lab) -> None:
    """Layers of three classes, of which one inherits from another."""
    flags = [*FP8, *GRAPHS["layers"][0], "--mamba-head-dim", "4", "--train-iters", "4"]
    plain = te_lab.run("one hybrid", flags)
    collected = te_lab.run("one hybrid", [*flags, *COLLECT_ONLY])
    assert weights(collected) == weights(plain)
    assert logged(collected) == logged(plain)


@pytest.mark.parametrize("captured", GRAPHS)
def test_transformer_engine_under_graphs_trains_as_without(te_lab: Lab, captured: str) -> None:
    """Bitwise: measured only, and with plans that are captured again."""
    graphs, text = GRAPHS[captured]
    for flags in (COLLECT_ONLY, PLANS):
        run = te_lab.run("te", [*FP8, *graphs, *flags])
        eager = te_lab.run("te", [*FP8, GENERATOR, *flags])
        assert weights(run) == weights(eager), run.report
        assert logged(run) == logged(eager)
        lines = snip_lines(run)
        num_plans = sum("plan applied" in line for line in lines)  # not those that are unchanged
        assert bool(num_plans) == (flags is PLANS)
        assert sum(text in line for line in lines) == 1 + num_plans, run.report


@pytest.mark.parametrize("captured", GRAPHS)
def test_a_pipeline_stage_without_layers_trains_on(te_lab: Lab, captured: str) -> None:
    """The last stage has the output layer and the loss alone, and no layer to capture."""
    flags = [*FP8, *PLANS, "--pipeline-model-parallel-layout", "Etttt|L"]
    graphs, text = GRAPHS[captured]
    run = te_lab.run("te pp2", [*flags, *graphs])
    eager = te_lab.run("te pp2", [*flags, GENERATOR])
    assert weights(run) == weights(eager), run.report
    lines = snip_lines(run)
    num_plans = sum("plan applied" in line for line in lines)
    assert num_plans > 0
    assert sum(text in line for line in lines) == 1 + num_plans, run.report


@pytest.mark.parametrize("captured", GRAPHS)
def test_an_evaluation_by_groups_runs_without_graphs(te_lab: Lab, captured: str) -> None:
    """A graph holds one precision. Bitwise what it finds, and trains, without graphs."""
    groups = ["--snip-eval-precision", "groups"]
    run = te_lab.run("te", [*FP8, *GRAPHS[captured][0], *PLANS, *groups])
    _is_as_without_graphs(run, te_lab.run("te", [*FP8, GENERATOR, *PLANS, *groups]), "mlp")


def test_experts_are_evaluated_as_a_group_beside_graphs_of_attention(te_lab: Lab) -> None:
    groups = ["--snip-eval-precision", "groups"]
    graphs = [*GRAPHS["layers"][0], "--cuda-graph-modules", "attn"]
    run = te_lab.run("te ep2", [*FP8, *graphs, *PLANS, *groups])
    _is_as_without_graphs(run, te_lab.run("te ep2", [*FP8, GENERATOR, *PLANS, *groups]), "experts")


def _is_as_without_graphs(run: Run, eager: Run, group: str) -> None:
    assert weights(run) == weights(eager), run.report
    found, wanted = (
        [
            {key: value for key, value in row.items() if "eval/" in key or "validation" in key}
            for row in read_lines(each.output / "metrics.jsonl")
        ]
        for each in (run, eager)
    )
    assert found == wanted
    assert f"eval/increase_of/{group}" in found[-1]
    assert any(found[-1][key] for key in found[-1] if "increase_of" in key)
    lines = snip_lines(run)
    assert any(": captured " in line for line in lines), run.report
    assert not any("captured the validation step" in line for line in lines)
    captures_all = any("captured the training step" in line for line in lines)
    noted = [line for line in lines if "evaluations run without CUDA graphs" in line]
    assert len(noted) == captures_all

"""CUDA graphs in Megatron's own `pretrain`, imitated on the CPU."""

import pytest

from tests.megatron.fast_flags import GRAPH, GRAPHS
from tests.megatron.lab import COLLECT_ONLY, SNIP, Lab, logged, snip_lines, weights


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

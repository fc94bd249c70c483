"""CUDA graphs in Megatron's own `pretrain`, imitated on the CPU."""

from tests.megatron.lab import COLLECT_ONLY, SNIP, Lab, logged, snip_lines, weights

GRAPH = ["--cuda-graph-impl", "full_iteration", "--cuda-graph-warmup-steps", "1"]
GRAPH += ["--no-check-for-nan-in-loss-and-grad"]


def test_measuring_beside_a_graph_of_the_iteration_changes_no_bit(lab: Lab) -> None:
    plain = lab.run("dp2", GRAPH)
    assert weights(plain) == weights(lab.run("dp2"))
    collected = lab.run("dp2", [*GRAPH, *COLLECT_ONLY])
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

"""Megatron's own `pretrain`, through `python -m megatron_snip --cpu SCRIPT`, on 1 and 2 ranks."""

import json
import re

import pytest

from tests.distributed.launch import free_port
from tests.megatron.lab import (
    COLLECT_ONLY,
    ITERATIONS,
    SNIP,
    Lab,
    applied_plans,
    logged,
    read_lines,
    saving,
    snip_lines,
    weights,
)

LAYOUTS = ("tp2", "pp2", "dp2")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_snip_a_run_is_bitwise_plain_megatron(lab: Lab, layout: str) -> None:
    plain = lab.run(layout, plain=True)
    off = lab.run(layout)
    assert weights(off) == weights(plain)
    assert [r["losses"] for r in off.finished()] == [r["losses"] for r in plain.finished()]
    assert not snip_lines(off)


@pytest.mark.parametrize("without", ["0", "1"])
def test_a_rank_without_snip_ends_the_job_with_a_line_that_names_it(lab: Lab, without: str) -> None:
    run = lab.run("pp2", SNIP, {"TINY_WITHOUT_SNIP": without})
    line = f"--snip is missing on rank {without}; start all ranks with the same flags and files"
    with_snip = 1 - int(without)
    assert run.statuses[with_snip] == 2, run.report
    assert run.logs[with_snip].count(line) == 1 and "Traceback" not in run.logs[with_snip]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_measuring_without_planning_changes_no_bit(lab: Lab, layout: str) -> None:
    collected = lab.run(layout, COLLECT_ONLY)
    assert weights(collected) == weights(lab.run(layout))
    assert logged(collected) == logged(lab.run(layout))
    assert logged(collected, "grad norm") == logged(lab.run(layout), "grad norm")
    assert sorted(p.name for p in (collected.output / "problems").iterdir()) == ["3.json", "7.json"]


@pytest.mark.parametrize("layout", [*LAYOUTS, "vpp2", "ep2"])
def test_plans_are_made_and_run(lab: Lab, layout: str) -> None:
    run = lab.planned(layout)
    run.finished()
    assert applied_plans(run) == [5, 9], run.report
    plan = json.loads((run.output / "plans" / "3.json").read_text())
    assert plan["efficiency"] >= 0.5
    assert len(plan["linears"]) == 16
    fc1 = "mlp.experts.linear_fc1" if layout == "ep2" else "mlp.linear_fc1"
    assert f"decoder.layers.3.{fc1}" in plan["linears"]
    losses = {i: float(value) for i, value in logged(run).items()}
    assert losses[ITERATIONS] < losses[1] - 0.5
    # Until the first plan the run is plain Megatron; from then on linears run in FP4.
    before, after = logged(lab.run(layout)), logged(run)
    assert [after[i] for i in range(1, 5)] == [before[i] for i in range(1, 5)]
    assert after[5] != before[5]


def test_a_plan_that_breaks_an_iteration_is_reverted_without_a_trace(lab: Lab) -> None:
    run = lab.run("tp2", SNIP, {"TINY_BREAK": "1"})
    assert weights(run) == weights(lab.run("tp2"))  # as if there had been no plan
    assert logged(run) == logged(lab.run("tp2"))
    applied = applied_plans(run)
    reverted = re.findall(r"snip: iteration (\d+): reverted", run.logs[0])
    assert applied[0] == 5 and [int(iteration) for iteration in reverted] == applied, run.report


def test_a_skipped_iteration_delays_its_refresh_and_its_plan(lab: Lab) -> None:
    """Without the skips: refreshes at 3 and 7, plans at 5 and 9."""
    run = lab.run("dp2", [*SNIP, "--iterations-to-skip", "3", "6"])
    run.finished()
    assert sorted(p.name for p in (run.output / "problems").iterdir()) == ["4.json", "7.json"]
    assert applied_plans(run) == [7, 9], run.report
    metrics = read_lines(run.output / "metrics.jsonl")
    assert [m["iteration"] for m in metrics] == [1, 2, 4, 5, 7, 8, 9, 10]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rank_0_writes_the_run_directory(lab: Lab, layout: str) -> None:
    """By default `snip/` below --save; losses come from the last rank."""
    run = lab.planned(layout)
    directory = run.output
    present = {p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file()}
    assert {"config.yaml", "versions.json", "divergences/7.json", "problems/7.json"} <= present
    metrics = read_lines(directory / "metrics.jsonl")
    assert [m["iteration"] for m in metrics] == list(range(1, ITERATIONS + 1))
    for m, shown in zip(metrics, logged(run).values(), strict=True):
        # Megatron's second log line is the mean of the first two iterations.
        assert f"{m['loss']:.6E}" == shown or m["iteration"] == 2
        assert m["grad_norm"] > 0 and m["lr"] >= 0 and m["tokens_per_s"] > 0
    assert [m["iteration"] for m in metrics if "validation_loss" in m] == [5, 10]
    fractions = [m["lowest_precision_fraction"] for m in metrics]
    assert fractions[:4] == [0.0] * 4 and min(fractions[4:]) >= 0.5


def test_recomputed_activations_change_no_bit(lab: Lab) -> None:
    recompute = ["--recompute-granularity", "full", "--recompute-method", "uniform"]
    flags = [*SNIP, *recompute, "--recompute-num-layers", "1"]
    assert weights(lab.run("tp2", flags)) == weights(lab.planned("tp2"))


def test_a_repeated_iteration_measures_again_and_draws_the_same_numbers(lab: Lab) -> None:
    """Megatron's rerun state machine repeats iteration 7, a refresh's, and compares the losses."""
    run, planned = lab.run("pp2", SNIP, {"TINY_DOUBT": "6"}), lab.planned("pp2")
    assert "unexpected result is reproducible" in run.logs[1], run.report
    assert "not reproducible" not in run.logs[1]
    assert weights(run) == weights(planned)
    once, repeated = len(planned.finished()[1]["losses"]), len(run.finished()[1]["losses"])
    assert repeated == once + 4  # the iteration's microbatches again, and no measuring pass


@pytest.mark.parametrize("layout", ["tp2", "vpp2"])
def test_an_evaluation_in_both_precisions_is_one_under_the_plan_and_one_in_bf16(
    lab: Lab, layout: str
) -> None:
    runs = {
        precision: lab.run(layout, [*SNIP, "--snip-eval-precision", precision])
        for precision in ("plan", "bf16", "both")
    }
    assert weights(runs["plan"]) == weights(runs["bf16"]) == weights(runs["both"])
    plan, bf16, both = (run.finished()[-1]["evaluated"] for run in runs.values())
    pairs = [(plan[i : i + 4], bf16[i : i + 4]) for i in range(0, len(plan), 4)]  # microbatches
    assert both == [loss for pair in pairs for part in pair for loss in part] != []
    metrics = [read_lines(run.output / "metrics.jsonl") for run in runs.values()]
    plan, bf16, rows = ([m for m in lines if "validation_loss" in m] for lines in metrics)
    assert [row["iteration"] for row in rows] == [5, 10]
    for under_plan, in_bf16, row in zip(plan, bf16, rows, strict=True):
        increase = under_plan["validation_loss"] - in_bf16["validation_loss"]
        assert row["eval/loss_increase"] == pytest.approx(increase, rel=1e-3, abs=1e-6) != 0
        assert row["eval/loss_increase_error"] > 0 and row["eval/loss_divergence"] > 0
    # The evaluations after training use other samples than that of the last iteration.
    names = ("", "final_validation_", "test_")
    found = [rows[-1][f"eval/{name}loss_increase"] for name in names]
    assert len(set(found)) == 3
    assert rows[-1]["final_validation_loss"] != rows[-1]["test_loss"]
    assert rows[-1]["loss"] > 0 and rows[-1]["wall_s"] > 0
    lines = "\n".join(snip_lines(runs["both"]))
    for kind, increase in zip(("", "final validation ", "test "), found, strict=True):
        assert f"iteration 10: {kind}evaluation under the" in lines
        assert f": {increase:+.4g} +-" in lines


def test_an_evaluation_by_groups_attributes_the_increase_of_both_precisions(lab: Lab) -> None:
    runs = [lab.run("vpp2", [*SNIP, "--snip-eval-precision", each]) for each in ("both", "groups")]
    assert weights(runs[0]) == weights(runs[1])
    lines = [read_lines(run.output / "metrics.jsonl") for run in runs]
    both, groups = ([m for m in rows if "validation_loss" in m] for rows in lines)
    for row, attributed in zip(both, groups, strict=True):
        increases = {key: value for key, value in row.items() if key.startswith("eval/")}
        assert increases.items() <= attributed.items()
    for name in ("", "final_validation_", "test_"):
        for group in ("attention", "mlp", "first_third", "middle_third", "last_third"):
            key = f"eval/{name}increase_of/{group}"
            assert groups[-1][key] != 0 and groups[-1][f"{key}_error"] > 0
    text = "\n".join(snip_lines(runs[1]))
    assert "evaluations run each microbatch up to 7 times: under the plan" in text
    assert "iteration 10: test evaluation: of this attention " in text


def test_a_job_that_only_evaluates_names_its_iteration_and_adds_no_metrics(lab: Lab) -> None:
    both = [*SNIP, "--snip-eval-precision", "both"]
    folder = lab.output("evaluated")
    lab.run("one", [*both, *saving(folder, at=100)]).finished()
    run = lab.run("one", [*both, "--load", str(folder), "--skip-train"])
    run.finished()
    lines = snip_lines(run)
    assert any("iteration 10: final validation evaluation under" in line for line in lines), lines
    assert not any("iteration 0:" in line for line in lines)
    assert not (run.output / "metrics.jsonl").exists()


def test_a_second_training_in_the_process_is_the_first_again(lab: Lab) -> None:
    """In-process restart: arguments are parsed again and the model is another."""
    environment = {"TINY_RESTART": str(free_port())}
    run = lab.run("tp2", SNIP, environment)
    assert weights(run) == weights(lab.planned("tp2"))
    assert applied_plans(run) == [5, 9] * 2

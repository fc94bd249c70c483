"""Megatron-Bridge's own `pretrain` with one of its recipes, on two ranks."""

import json
import re
from pathlib import Path

import pytest

from tests.bridge.lab import (
    COLLECT_ONLY,
    LAYOUTS,
    ON_CPU,
    SCRIPT,
    SNIP,
    Lab,
    losses,
    saving,
    weights,
)
from tests.megatron.lab import applied_plans, read_lines, snip_lines


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_snip_a_run_is_bitwise_plain_bridge(lab: Lab, layout: str) -> None:
    plain, off = lab.run(layout, plain=True), lab.run(layout)
    assert weights(off) == weights(plain)
    assert losses(off) == losses(plain)
    assert not snip_lines(off)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_measuring_without_planning_changes_no_bit(lab: Lab, layout: str) -> None:
    collected = lab.run(layout, COLLECT_ONLY)
    assert weights(collected) == weights(lab.run(layout))
    assert losses(collected) == losses(lab.run(layout))
    assert sorted(p.name for p in (collected.output / "problems").iterdir()) == ["3.json", "7.json"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_plans_are_made_and_run(lab: Lab, layout: str) -> None:
    run = lab.run(layout, SNIP)
    run.finished()
    assert applied_plans(run) == [5, 9], run.report
    plan = json.loads((run.output / "plans" / "3.json").read_text())
    assert plan["efficiency"] >= 0.5 and len(plan["linears"]) == 16
    fc1 = "mlp.experts.linear_fc1" if layout == "moe-ep2" else "mlp.linear_fc1"
    assert f"decoder.layers.3.{fc1}" in plan["linears"]
    before, after = losses(lab.run(layout)), losses(run)
    two = len(before[-1]) // 10  # values an iteration
    assert after[-1][: 4 * two] == before[-1][: 4 * two]  # until the first plan
    assert after[-1][4 * two] != before[-1][4 * two]


def test_a_plan_that_breaks_an_iteration_is_reverted_without_a_trace(lab: Lab) -> None:
    run = lab.run("llama-tp2", SNIP, {"TINY_BREAK": "1"})
    assert weights(run) == weights(lab.run("llama-tp2"))  # as if there had been no plan
    assert losses(run) == losses(lab.run("llama-tp2"))
    flops = [[rank["flops"] for rank in each.finished()] for each in (run, lab.run("llama-tp2"))]
    assert flops[0] == flops[1]  # a repeated iteration counts once
    reverted = re.findall(r"snip: iteration (\d+): reverted", run.logs[0])
    assert reverted and [int(iteration) for iteration in reverted] == applied_plans(run), run.report


@pytest.mark.parametrize("layout", ["llama-tp2", "llama-pp2"])
def test_rank_0_writes_the_run_directory_with_losses_and_evaluations(lab: Lab, layout: str) -> None:
    run = lab.run(layout, SNIP)
    metrics = read_lines(run.output / "metrics.jsonl")
    assert [m["iteration"] for m in metrics] == list(range(1, 11))
    shown = [text.removeprefix("lm loss ") for text in losses(run)[-1] if "lm loss" in text]
    assert [m["loss"] for m in metrics] == [pytest.approx(float(x)) for x in shown]
    assert all(m["grad_norm"] > 0 and m["lr"] >= 0 and m["tokens_per_s"] > 0 for m in metrics)
    evaluated = [m["validation_loss"] for m in metrics if "validation_loss" in m]
    assert evaluated == [pytest.approx(float(x)) for x in run.finished()[-1]["evaluated"][:2]]
    config = (run.output / "config.yaml").read_text()
    assert "tensor_model_parallel_size" in config


def test_a_callback_does_what_flags_do(lab: Lab, tmp_path: Path) -> None:
    settings = {"interval": 4, "start_step": 3, "lag": 2, "efficiency_target": 0.5}
    settings |= {"backend": "simulate", "output_dir": str(tmp_path / "run")}
    environment = {"TINY_CALLBACK": json.dumps(settings)}
    in_code = lab.run("llama-tp2", environment=environment, plain=True)
    flags = lab.run("llama-tp2", SNIP)
    assert weights(in_code) == weights(flags)
    plans = [
        json.loads((folder / "plans" / "3.json").read_text())["digest"]
        for folder in (tmp_path / "run", flags.output)
    ]
    assert plans[0] == plans[1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_killed_run_resumes_bitwise(lab: Lab, layout: str, tmp_path: Path) -> None:
    """Saved after iteration 7, with a refresh in flight; every rank is lost after that."""
    save = saving(tmp_path / "checkpoints")
    killed = lab.run(layout, [*SNIP, *save], {"TINY_KILL_AFTER": "7"})
    assert all(status != 0 for status in killed.statuses), killed.report
    again = lab.run(layout, [*SNIP, f"checkpoint.load={tmp_path / 'checkpoints'}"])
    uninterrupted = lab.run(layout, SNIP)
    assert weights(again) == weights(uninterrupted)
    assert any("resumes after iteration 7 with" in line for line in snip_lines(again))
    assert applied_plans(again) == [9]
    assert losses(again)[-1] == losses(uninterrupted)[-1][-len(losses(again)[-1]) :]


def test_a_killed_run_with_a_callback_resumes_bitwise(lab: Lab, tmp_path: Path) -> None:
    """Saves and loads at one place, as a recipe does that is simply started again."""
    folder = tmp_path / "checkpoints"
    words = [*saving(folder), f"checkpoint.load={folder}", *ON_CPU.split()]
    settings = {"interval": 4, "start_step": 3, "lag": 2, "efficiency_target": 0.5}
    environment = {"TINY_CALLBACK": json.dumps({**settings, "backend": "simulate"})}
    script = [SCRIPT, *LAYOUTS["llama-tp2"], *words]
    killed = lab.run_words(script, {**environment, "TINY_KILL_AFTER": "7"}, plain=True)
    assert all(status != 0 for status in killed.statuses), killed.report
    again = lab.run_words(script, environment, plain=True)
    uninterrupted = lab.run("llama-tp2", SNIP)
    assert weights(again) == weights(uninterrupted)
    assert losses(again)[-1] == losses(uninterrupted)[-1][-len(losses(again)[-1]) :]
    assert any("resumes after iteration 7 with" in line for line in snip_lines(again))
    assert applied_plans(again) == [9]
    plans, metrics = folder / "snip" / "plans", read_lines(folder / "snip" / "metrics.jsonl")
    assert {"3.json", "7.json"} <= {plan.name for plan in plans.iterdir()}
    assert [row["iteration"] for row in metrics] == list(range(1, 11))


def test_an_evaluation_in_both_precisions_says_what_the_plan_costs(lab: Lab) -> None:
    both = lab.run("llama-pp2", [*SNIP, "--snip-eval-precision", "both"])
    assert weights(both) == weights(lab.run("llama-pp2", SNIP))
    rows = [m for m in read_lines(both.output / "metrics.jsonl") if "validation_loss" in m]
    assert [row["iteration"] for row in rows] == [5, 10]
    assert all(row["eval/loss_increase_error"] > 0 for row in rows)


def test_an_evaluation_by_groups_attributes_the_increase_to_experts_as_well(lab: Lab) -> None:
    runs = [
        lab.run("moe-ep2", [*SNIP, "--snip-eval-precision", each]) for each in ("both", "groups")
    ]
    assert weights(runs[0]) == weights(runs[1])
    both, groups = (
        [m for m in read_lines(run.output / "metrics.jsonl") if "validation_loss" in m]
        for run in runs
    )
    for row, attributed in zip(both, groups, strict=True):
        increases = {key: value for key, value in row.items() if key.startswith("eval/")}
        assert increases and increases.items() <= attributed.items()
    kinds = ("attention", "experts")
    of_experts = [f"eval/increase_of/{kind}" for kind in kinds]
    assert all(groups[-1][key] != 0 and groups[-1][f"{key}_error"] > 0 for key in of_experts)
    text = "\n".join(snip_lines(runs[1]))
    assert "evaluations run each microbatch up to 7 times: under the plan" in text
    assert "iteration 10: evaluation: of this attention " in text


def test_evaluations_of_another_size_are_no_part_of_training(lab: Lab) -> None:
    """Their own number of samples, microbatches and first iteration, as Bridge's `validation`."""
    sizes = "eval_interval=3 eval_iters=2 eval_global_batch_size=4 eval_micro_batch_size=1"
    words = [f"validation.{word}" for word in f"{sizes} start_eval_at_iter=6".split()]
    plain = lab.run("llama-tp2", words, plain=True)
    assert weights(plain) == weights(lab.run("llama-tp2"))
    run = lab.run("llama-tp2", [*SNIP, *words, "--snip-eval-precision", "both"])
    usual = lab.run("llama-tp2", SNIP)
    assert weights(run) == weights(usual)
    assert losses(run) == losses(usual)
    for name in ("3.json", "7.json"):
        problems = [(of.output / "problems" / name).read_bytes() for of in (run, usual)]
        plans = [json.loads((of.output / "plans" / name).read_text()) for of in (run, usual)]
        assert problems[0] == problems[1] and plans[0]["linears"] == plans[1]["linears"]
    rows = read_lines(run.output / "metrics.jsonl")
    found = {row["iteration"]: row["validation_loss"] for row in rows if "validation_loss" in row}
    evaluated = run.finished()[-1]["evaluated"]
    assert found == {6: pytest.approx(float(evaluated[0])), 9: pytest.approx(float(evaluated[1]))}
    for name, printed in (("final_validation", "validation"), ("test", "test")):
        pattern = rf"iteration 10 on {printed} set \| lm loss value: (\S+)"
        (shown,) = re.findall(pattern, run.logs[-1])
        assert rows[-1][f"{name}_loss"] == pytest.approx(float(shown))
    # The first plan runs from iteration 5 on, so it costs something in all of them.
    for iteration, kind in ((6, ""), (9, ""), (10, "final_validation_"), (10, "test_")):
        assert rows[iteration - 1][f"eval/{kind}loss_increase_error"] > 0


def test_an_evaluation_without_training_runs_the_checkpoint_s_plan(
    lab: Lab, tmp_path: Path
) -> None:
    both = [*SNIP, "--snip-eval-precision", "both"]
    lab.run("llama-tp2", [*both, *saving(tmp_path / "checkpoints")]).finished()
    words = [f"checkpoint.load={tmp_path / 'checkpoints'}", "validation.skip_train=true"]
    run = lab.run("llama-tp2", [*both, *words])
    assert not any(run.statuses), run.report
    lines = "\n".join(snip_lines(run))
    for kind in ("final validation", "test"):
        assert f"iteration 10: {kind} evaluation under the" in lines
    assert not list(run.output.glob("problems/*"))
    assert not (run.output / "metrics.jsonl").exists()

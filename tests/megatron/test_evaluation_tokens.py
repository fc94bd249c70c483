"""Evaluations whose microbatches have another number of tokens than those of training."""

import pytest

from tests.megatron.lab import SNIP, Lab, applied_plans, logged, saving, snip_lines, weights

TENSORWISE = ["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"]
SMALL = ["--num-layers", "2", "--train-iters", "6", "--global-batch-size", "16"]
SMALL += ["--micro-batch-size", "4"]
JOBS = {
    # 96 tokens in training, 24 in evaluations. MXFP8 and NVFP4 need multiples of 32.
    "bf16": ["--seq-length", "24"],
    "pp2": ["--seq-length", "24"],
    # 64 and 16. What the job itself runs needs a multiple of 16.
    "tensorwise": ["--seq-length", "16", *TENSORWISE],
}
LAYOUTS = {"pp2": "te pp2"}
THREE = ["--snip-formats", "bf16,fp8,fp4"]
ONE_SAMPLE = ["--eval-micro-batch-size", "1"]
SAYS = "evaluations run what the job itself runs, and not the plan"


def planned(lab: Lab, job: str, *flags: str) -> list[str]:
    return [*SMALL, *JOBS[job], *SNIP, *THREE, *flags]


@pytest.mark.parametrize("precision", ["plan", "both"])
@pytest.mark.parametrize("job", ["bf16", "pp2"])
def test_an_evaluation_that_no_recipe_can_run_runs_in_bf16(
    te_lab: Lab, job: str, precision: str
) -> None:
    layout = LAYOUTS.get(job, "te")
    flags = [*planned(te_lab, job), *ONE_SAMPLE, "--snip-eval-precision"]
    run = te_lab.run(layout, [*flags, precision])
    truth = te_lab.run(layout, [*flags, "bf16"])
    assert weights(run) == weights(truth)
    assert [r["evaluated"] for r in run.finished()] == [r["evaluated"] for r in truth.finished()]
    assert applied_plans(run) == [5]
    said = [line for line in snip_lines(run) if SAYS in line]
    assert len(said) == 1 and "a multiple of 32 tokens" in said[0] and "has 24" in said[0]
    assert not any(SAYS in line for line in snip_lines(truth))


def test_an_evaluation_runs_in_fp8_where_the_job_does(te_lab: Lab) -> None:
    """From a checkpoint: as the job without a plan evaluates it."""
    folder = te_lab.output("evaluated in FP8")
    job = [*SMALL, *JOBS["tensorwise"]]
    te_lab.run("te", [*job, *saving(folder, at=100)]).finished()
    evaluates = ["--load", str(folder), "--skip-train", *ONE_SAMPLE]
    plain = te_lab.run("te", [*job, *evaluates])
    plan = ["--snip", *THREE, "--snip-policy", "uniform-fp4"]
    run = te_lab.run("te", [*job, *evaluates, *plan])
    assert [r["evaluated"] for r in run.finished()] == [r["evaluated"] for r in plain.finished()]
    assert any(SAYS in line for line in snip_lines(run))


def test_such_an_evaluation_leaves_no_trace_in_training(te_lab: Lab) -> None:
    """Its linears had quantizers of their own, and get those of the plan again."""
    run = te_lab.run("te", planned(te_lab, "tensorwise", *ONE_SAMPLE))
    fitting = te_lab.run("te", planned(te_lab, "tensorwise", "--eval-micro-batch-size", "2"))
    assert weights(run) == weights(fitting)
    assert logged(run) == logged(fitting)
    assert any(SAYS in line for line in snip_lines(run))
    assert not any(SAYS in line for line in snip_lines(fitting))

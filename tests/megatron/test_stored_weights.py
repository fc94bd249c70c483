"""Weights that Megatron's optimizers store quantized, on two ranks: DDP's and Megatron-FSDP's."""

import pytest

from tests.megatron.fast_flags import GATHERED_BF16, MXFP8, NVFP4, SHORT, SMALL, STORED
from tests.megatron.lab import (
    COLLECT_ONLY,
    OVERLAP,
    PP2,
    SNIP,
    Lab,
    applied_plans,
    logged,
    saving,
    snip_lines,
    weights,
)

TENSORWISE = ["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"]
JOBS = {
    "nvfp4": ("te dp2", [*NVFP4, "--fp4-param-gather"]),
    "tensorwise": ("te dp2", [*TENSORWISE, STORED]),
    "tensorwise, FSDP": ("te megatron-fsdp", [*TENSORWISE, STORED]),
    # A measured iteration of fused MLPs has a pass of its own before the pass that counts.
    "mxfp8, fused": ("te dp2", [*GATHERED_BF16, "--use-transformer-engine-op-fuser"]),
}
PLANS = [*SMALL, "--train-iters", "6", *SNIP]
"""A plan runs from iteration 5 on."""
THREE = ["--snip-formats", "bf16,fp8,fp4"]
UNCLIPPED = ["--clip-grad", "0"]
"""The norm of all gradients is added up in the order of buckets, and stored weights have others."""


@pytest.mark.parametrize("job", ["tensorwise", "tensorwise, FSDP", "mxfp8, fused"])
def test_measuring_changes_no_bit(te_lab: Lab, job: str) -> None:
    """Other jobs with MXFP8 and NVFP4 are in test_contracts.py."""
    layout, flags = JOBS[job]
    plain = te_lab.run(layout, [*flags, *SHORT])
    collected = te_lab.run(layout, [*flags, *SHORT, *COLLECT_ONLY])
    assert weights(collected) == weights(plain)
    assert logged(collected) == logged(plain)
    assert logged(collected, "grad norm") == logged(plain, "grad norm")
    assert [path.name for path in (collected.output / "problems").iterdir()] == ["3.json"]


@pytest.mark.parametrize("layout", ["te dp2", "te dist-opt2"])
def test_a_plan_runs_on_exact_weights_where_megatron_gathers_bf16(te_lab: Lab, layout: str) -> None:
    """Bit by bit as in a job that stores BF16 weights: the same plan, the same losses.

    The second layout gathers after a step, and so before the first iteration under a plan.
    """
    stored = te_lab.run(layout, [*GATHERED_BF16, *UNCLIPPED, *PLANS, *THREE])
    truth = te_lab.run(layout, [*MXFP8, *UNCLIPPED, *PLANS, *THREE])
    assert [result["losses"] for result in stored.finished()] == [
        result["losses"] for result in truth.finished()
    ]
    assert applied_plans(stored) == applied_plans(truth) == [5]


def test_a_repeated_pass_gathers_the_same_weights_from_the_gradient_buffer(te_lab: Lab) -> None:
    """Each plan breaks its first iteration and is reverted, as if there had been none."""
    flags = [*GATHERED_BF16, *SMALL, "--train-iters", "6"]
    run = te_lab.run("te dp2", [*flags, *SNIP, *THREE], {"TINY_BREAK": "1"})
    plain = te_lab.run("te dp2", flags)
    assert "iteration 5: reverted" in run.logs[0], run.report
    assert logged(run) == logged(plain)
    assert weights(run) == weights(plain)


MOE = ["--num-experts", "4", "--expert-model-parallel-size", "2", "--moe-router-topk", "2"]
MOE += ["--moe-ffn-hidden-size", "128", "--moe-grouped-gemm"]
MOE += ["--moe-token-dispatcher-type", "alltoall"]
RESUMED = {
    "mxfp8": ("te dp2", [*GATHERED_BF16, *THREE]),
    "mxfp8, without overlap": ("te dist-opt2", [*GATHERED_BF16, *THREE]),
    "mxfp8, experts": ("te dp2", [*GATHERED_BF16, *MOE, "--snip-formats", "bf16,fp8"]),
    "mxfp8, fused": ("te dp2", [*GATHERED_BF16, *THREE, "--use-transformer-engine-op-fuser"]),
    "nvfp4": ("te dp2", [*JOBS["nvfp4"][1], "--snip-formats", "bf16,fp4"]),
    "tensorwise": ("te dp2", [*JOBS["tensorwise"][1], "--snip-formats", "bf16,fp8"]),
}


@pytest.mark.parametrize("job", RESUMED)
def test_a_killed_run_resumes_bitwise(te_lab: Lab, job: str) -> None:
    """A plan runs from iteration 5 on, and the resumed run starts with iteration 8.

    Not under delayed scaling: docs/limits.md.
    """
    layout, flags = RESUMED[job]
    flags = [*flags, *SMALL, *SNIP]
    folder = te_lab.output(f"killed {job}")
    uninterrupted = te_lab.run(layout, flags)
    te_lab.run(layout, [*flags, *saving(folder)], {"TINY_KILL_AFTER": "7"})
    again = te_lab.run(layout, [*flags, "--load", str(folder)])
    assert weights(again) == weights(uninterrupted)
    norms = logged(uninterrupted, "grad norm")
    assert logged(again, "grad norm") == {i: norms[i] for i in (8, 9, 10)}
    assert 5 in applied_plans(uninterrupted) and applied_plans(again) == [9]
    finished = zip(uninterrupted.finished(), again.finished(), strict=True)
    for before, after in finished:
        assert after["evaluated"] == before["evaluated"][-len(after["evaluated"]) :]


TP2 = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
OTHER_LAYOUTS = {"tp2": ("te dp2", TP2), "pp2": ("te dp2", PP2), "one": ("te", OVERLAP)}
"""A layout and flags of a job that resumes what two data-parallel ranks saved."""
RESHARDED = "--dist-ckpt-optim-fully-reshardable"


@pytest.mark.parametrize("layout", OTHER_LAYOUTS)
def test_a_run_resumes_in_another_layout_on_exact_weights(te_lab: Lab, layout: str) -> None:
    """Bit by bit as a job that stores BF16 weights, which is stopped and resumed alike."""
    ranks, parallel = OTHER_LAYOUTS[layout]
    found = []
    for name, stored in (("mxfp8", GATHERED_BF16), ("bf16", MXFP8)):
        flags = [*stored, *UNCLIPPED, *SMALL, *SNIP, *THREE, RESHARDED]
        folder = te_lab.output(f"killed {name}, to be resharded")
        te_lab.run("te dp2", [*flags, *saving(folder)], {"TINY_KILL_AFTER": "7"})
        again = te_lab.run(ranks, [*flags, *parallel, "--load", str(folder)])
        again.finished()
        assert any("resumes after iteration 7 with the snip plan" in x for x in snip_lines(again))
        found.append(again)
    again, truth = found
    losses = [[rank["losses"] for rank in run.finished()] for run in found]
    assert losses[0] == losses[1] and losses[0][-1]
    assert applied_plans(again) == applied_plans(truth) == [9]


def test_finetuning_from_stored_weights_starts_anew(te_lab: Lab) -> None:
    """The optimizer is not loaded: its FP32 weights are what the checkpoint's weights are."""
    flags = [*GATHERED_BF16, *SMALL]
    folder = te_lab.output("killed, for fine-tuning")
    te_lab.run("te dp2", [*flags, *SNIP, *THREE, *saving(folder)], {"TINY_KILL_AFTER": "7"})
    flags += ["--finetune", "--load", str(folder)]
    plain = te_lab.run("te dp2", flags)
    tuned = te_lab.run("te dp2", [*flags, *SNIP, *THREE])
    tuned.finished()
    assert applied_plans(tuned) == [5, 9], tuned.report
    before, after = logged(plain), logged(tuned)
    assert [after[i] for i in range(1, 5)] == [before[i] for i in range(1, 5)]
    assert after[5] != before[5]


def test_a_reverted_plan_leaves_no_trace_in_the_copies_of_the_one_before(te_lab: Lab) -> None:
    """A plan for another target breaks its first iteration. The one before runs on exact weights,
    as in a run that plans once."""
    flags = [*GATHERED_BF16, *SMALL, *SNIP, *THREE]
    schedule = ["--snip-target-schedule", "1:0.25,6:0.75"]
    run = te_lab.run("te dp2", [*flags, *schedule], {"TINY_BREAK": "2"})
    assert "snip: iteration 7: reverted the snip plan of iteration 5" in run.logs[0], run.report
    once = te_lab.run(
        "te dp2", [*flags, "--snip-efficiency-target", "0.25", "--snip-interval", "100"]
    )
    assert logged(run) == logged(once)
    assert weights(run) == weights(once)


@pytest.mark.parametrize(("job", "formats"), [("nvfp4", "bf16,fp4"), ("tensorwise", "bf16,fp8")])
def test_a_plan_runs_on_dequantized_weights_in_other_jobs(
    te_lab: Lab, job: str, formats: str
) -> None:
    layout, flags = JOBS[job]
    plain = te_lab.run(layout, [*flags, *SMALL, "--train-iters", "6"])
    run = te_lab.run(layout, [*flags, *PLANS, "--snip-formats", formats])
    run.finished()
    assert applied_plans(run) == [5], run.report
    before = logged(plain)
    after = logged(run)
    assert [after[i] for i in range(1, 5)] == [before[i] for i in range(1, 5)]
    assert after[5] != before[5]
    assert float(after[6]) == pytest.approx(float(before[6]), rel=0.02)

"""Weights that Megatron's optimizers store quantized, on two ranks: DDP's and Megatron-FSDP's."""

import pytest

from tests.megatron.fast_flags import GATHERED_BF16, MXFP8, NVFP4, SHORT, SMALL, STORED
from tests.megatron.lab import COLLECT_ONLY, SNIP, Lab, applied_plans, logged, weights

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


def test_a_plan_runs_on_exact_weights_where_megatron_gathers_bf16(te_lab: Lab) -> None:
    """Bit by bit as in a job that stores BF16 weights: the same plan, the same losses."""
    formats = ["--snip-formats", "bf16,fp8,fp4"]
    stored = te_lab.run("te dp2", [*GATHERED_BF16, *UNCLIPPED, *PLANS, *formats])
    truth = te_lab.run("te dp2", [*MXFP8, *UNCLIPPED, *PLANS, *formats])
    assert [result["losses"] for result in stored.finished()] == [
        result["losses"] for result in truth.finished()
    ]
    assert applied_plans(stored) == applied_plans(truth) == [5]


def test_a_repeated_pass_gathers_the_same_weights_from_the_gradient_buffer(te_lab: Lab) -> None:
    """Each plan breaks its first iteration and is reverted, as if there had been none."""
    flags = [*GATHERED_BF16, *SMALL, "--train-iters", "6"]
    plans = [*SNIP, "--snip-formats", "bf16,fp8,fp4"]
    run = te_lab.run("te dp2", [*flags, *plans], {"TINY_BREAK": "1"})
    plain = te_lab.run("te dp2", flags)
    assert "iteration 5: reverted" in run.logs[0], run.report
    assert logged(run) == logged(plain)
    assert weights(run) == weights(plain)


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

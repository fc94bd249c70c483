"""Kernels that jobs on GPUs have by default, or for speed, by stand-ins that compute the same.

Weight gradients added in a GEMM (gradient accumulation fusion), SwiGLU of experts in fused
operations, and Adam on the remainders of BF16 weights.
"""

import json

import pytest

from tests.megatron.fast_flags import FUSED_EXPERTS, GATHERED_BF16, MXFP8, SHORT, SMALL
from tests.megatron.lab import COLLECT_ONLY, SNIP, Lab, applied_plans, logged, weights

FUSED_WGRAD = {"TINY_FUSED_WGRAD": "1"}
BF16_FP8 = ["--snip-formats", "bf16,fp8"]
PLANNED = [*SMALL, "--train-iters", "6", *SNIP, *BF16_FP8]
PRECISE = ["--use-precision-aware-optimizer"]
JOBS = {
    "wgrad of Megatron's linears": ("dp2", [], FUSED_WGRAD),
    "wgrad": ("te dp2", [], FUSED_WGRAD),
    "wgrad, experts": ("te ep2", [*MXFP8], FUSED_WGRAD),
    "wgrad, stored MXFP8": ("te dp2", [*GATHERED_BF16], FUSED_WGRAD),
    "SwiGLU of experts": ("te ep2", [*MXFP8, "--use-transformer-engine-op-fuser"], FUSED_EXPERTS),
    "Adam on remainders": ("te dp2", PRECISE, {}),
}


@pytest.mark.parametrize("job", JOBS)
def test_measuring_changes_no_bit_and_a_plan_trains(te_lab: Lab, job: str) -> None:
    layout, flags, environment = JOBS[job]
    plain = te_lab.run(layout, [*flags, *SHORT], environment)
    collected = te_lab.run(layout, [*flags, *SHORT, *COLLECT_ONLY, *BF16_FP8], environment)
    assert weights(collected) == weights(plain)
    assert logged(collected, "grad norm") == logged(plain, "grad norm")
    assert [path.name for path in collected.output.glob("problems/*")] == ["3.json"]
    run = te_lab.run(layout, [*flags, *PLANNED], environment)
    losses, before = logged(run), logged(plain)
    assert applied_plans(run) == [5], run.report
    assert [losses[i] for i in range(1, 5)] == [before[i] for i in range(1, 5)]
    assert float(losses[6]) < float(losses[1])


def test_grouped_experts_are_judged_by_the_config_that_runs(te_lab: Lab) -> None:
    """After 0.19 the fuser sets `moe_use_grouped_tensor` in the config; the argument stays false.

    Without the fuser SNIP cannot run with it.
    """
    config = {"TINY_CONFIG": json.dumps({"moe_use_grouped_tensor": True})}
    refused = te_lab.run("te ep2", [*MXFP8, *PLANNED], config)
    assert refused.statuses == (2, 2), refused.report
    errors = [x for x in refused.logs[0].splitlines() if x.startswith("megatron-snip: error: ")]
    assert len(errors) == 1 and "--moe-use-grouped-tensor" in errors[0], refused.report
    layout, flags, environment = JOBS["SwiGLU of experts"]
    fused = te_lab.run(layout, [*flags, *PLANNED], {**environment, **config})
    assert applied_plans(fused) == [5], fused.report
    assert weights(fused) == weights(te_lab.run(layout, [*flags, *PLANNED], environment))

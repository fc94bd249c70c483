"""Kernels that jobs on GPUs have by default, or for speed, by stand-ins that compute the same.

Weight gradients added in a GEMM (gradient accumulation fusion), SwiGLU of experts in fused
operations, and Adam on the remainders of BF16 weights.
"""

import pytest

from tests.megatron.fast_flags import GATHERED_BF16, MXFP8, SHORT, SMALL
from tests.megatron.lab import COLLECT_ONLY, SNIP, Lab, applied_plans, logged, weights

FUSED_EXPERTS = {"NVTE_CUTEDSL_FUSED_GROUPED_MLP": "1"}
"""With it Megatron 0.19.2 fuses gated experts."""
FUSED_WGRAD = {"TINY_FUSED_WGRAD": "1"}
BF16_FP8 = ["--snip-formats", "bf16,fp8"]
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
    length = [*SMALL, "--train-iters", "6"]
    run = te_lab.run(layout, [*flags, *length, *SNIP, *BF16_FP8], environment)
    losses, before = logged(run), logged(plain)
    assert applied_plans(run) == [5], run.report
    assert [losses[i] for i in range(1, 5)] == [before[i] for i in range(1, 5)]
    assert float(losses[6]) < float(losses[1])

"""A job in delayed scaling, with Megatron's flags for its history: measuring, plans, a resume."""

from tests.megatron.lab import (
    COLLECT_ONLY,
    SNIP,
    Lab,
    applied_plans,
    logged,
    recipes_of,
    saving,
    weights,
)

DELAYED = ["--fp8-format", "hybrid", "--fp8-recipe", "delayed", "--num-layers", "2"]
HISTORY = ["--fp8-amax-history-len", "6", "--fp8-amax-compute-algo", "max", "--fp8-margin", "1"]
DELAYED += HISTORY
"""An iteration has four microbatches, so the history covers one and a half."""
SHORT = [*DELAYED, "--train-iters", "4"]
PLANS = [*DELAYED, *SNIP, "--snip-formats", "bf16,fp8"]
LOADS = {"NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE": "1"}
"""The history in a checkpoint is a pickle. Transformer Engine loads it only with this variable."""


def test_measuring_leaves_no_trace_in_the_history(te_lab: Lab) -> None:
    plain = te_lab.run("te tp2", SHORT)
    collected = te_lab.run("te tp2", [*SHORT, *COLLECT_ONLY])
    assert weights(collected) == weights(plain)
    assert logged(collected, "grad norm") == logged(plain, "grad norm")
    assert "fp8 is the job's own delayed_hybrid recipe" in collected.logs[0]


def test_a_killed_run_resumes_bitwise(te_lab: Lab) -> None:
    output = te_lab.output("uninterrupted-delayed")
    uninterrupted = te_lab.run("te", [*PLANS, *saving(output)])
    folder = te_lab.output("killed-delayed")
    killed = te_lab.run("te", [*PLANS, *saving(folder)], {"TINY_KILL_AFTER": "7"})
    assert all(status != 0 for status in killed.statuses), killed.report
    again = te_lab.run("te", [*PLANS, "--load", str(folder)], LOADS)
    assert weights(again) == weights(uninterrupted)
    assert applied_plans(again) == [9]
    assert set(recipes_of(uninterrupted.output, 5).values()) == {"bf16", "delayed_hybrid"}

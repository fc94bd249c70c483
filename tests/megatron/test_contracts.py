"""What SNIP promises, under each fast flag that it accepts (patches/fast_flags.py), on two ranks.

Measuring changes no bit of the job, and beside a frozen plan it leaves no trace. Whatever fails in
a refresh, on whichever rank, all ranks train on under the plan that they have. What is kept in
memory is tested in tests/te/test_te_stored_weights.py: one BF16 weight at a time while stored
weights are measured, and one copy of each whose option is not the job's.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from megatron_snip.__main__ import main
from megatron_snip.patches.fast_flags import FAST_FLAGS
from tests.distributed.launch import Run
from tests.megatron import faults
from tests.megatron.fast_flags import (
    DELAYED_WGRAD,
    EXPERT_OVERLAP,
    GATHERED_BF16,
    GRAPH,
    GRAPHS,
    MXFP8,
    NVFP4,
    SHORT,
    SMALL,
    STORED,
    STREAMS,
)
from tests.megatron.lab import COLLECT_ONLY, SNIP, Lab, applied_plans, logged, weights


class Job(NamedTuple):
    """A job of two ranks.

    Attributes:
        layout: of `lab.py`.
        flags: Megatron's.
        formats: SNIP's flag of the formats.
    """

    layout: str
    flags: list[str]
    formats: tuple[str, str]


BF16_FP8 = ("--snip-formats", "bf16,fp8")
BF16_FP4 = ("--snip-formats", "bf16,fp4")
PLANNED = {
    "--fp8-param-gather with --reuse-grad-buf-for-mxfp8-param-ag": Job(
        "te dp2",
        [*GATHERED_BF16],
        BF16_FP8,
    ),
    "--fp8-param-gather or --fp4-param-gather alone": Job(
        "te dp2",
        [*NVFP4, "--fp4-param-gather"],
        BF16_FP4,
    ),
    "--cuda-graph-impl full_iteration": Job("te dp2", [*MXFP8, *GRAPH], BF16_FP8),
    "--cuda-graph-impl transformer_engine": Job("te dp2", [*MXFP8, *GRAPHS["layers"][0]], BF16_FP8),
    "--delay-wgrad-compute or --overlap-dispatch-backward-with-experts-wgrad": Job(
        "te ep2",
        [*MXFP8, *DELAYED_WGRAD],
        BF16_FP8,
    ),
    "--overlap-moe-expert-parallel-comm in an FP8 or FP4 run": Job(
        "te ep2",
        [*MXFP8, *EXPERT_OVERLAP],
        BF16_FP8,
    ),
    "--use-transformer-engine-op-fuser": Job(
        "te dp2",
        [*MXFP8, "--use-transformer-engine-op-fuser"],
        BF16_FP8,
    ),
    "--use-megatron-fsdp with BF16 weights": Job("te megatron-fsdp", [], BF16_FP8),
    "--use-torch-fsdp2": Job("te fsdp2", [], BF16_FP8),
}
"""Flag -> job."""
MEASURED = {
    "--use-megatron-fsdp with --fp8-param-gather or --fp4-param-gather": Job(
        "te megatron-fsdp",
        [*MXFP8, STORED],
        BF16_FP8,
    ),
}
"""Jobs that have no plans."""
ELSEWHERE = {
    # Measures only, with linears of Megatron's own.
    "CUDA graphs with --snip-backend simulate or --transformer-impl local": "test_graphs.py",
    # Its buffers are GPU memory that ranks share, and CUDA kernels write to it.
    "--tp-comm-overlap": "../unit/patches/test_overlap_buffers.py",
    # SNIP runs it with HybridEP, which is CUDA kernels. A stand-in overflows.
    "--moe-expert-rank-capacity-factor": "test_expert_capacity.py",
}
"""Flags that no CPU job can have, or that have jobs elsewhere -> where they are tested."""
NEVER = ("--snip-start-step", "100")


def run(
    lab: Lab, flag: str, *snip: str, length: Sequence[str] = SHORT, with_faults: bool = False
) -> Run:
    job = {**PLANNED, **MEASURED}[flag]
    environment = {**STREAMS} if job.layout == "te ep2" else {}
    if with_faults:
        environment["TINY_FAULTS"] = "1"
    formats = job.formats if snip else ()
    return lab.run(job.layout, [*job.flags, *length, *snip, *formats], environment)


def measurements(finished: Run) -> list[str]:
    return [path.name for path in finished.output.glob("problems/*")]


def test_every_accepted_flag_is_tested() -> None:
    accepted = {row.flag for row in FAST_FLAGS if row.plans != "refuses"}
    assert accepted == {*PLANNED, *MEASURED, *ELSEWHERE}
    assert all((Path(__file__).parent / file).is_file() for file in ELSEWHERE.values())


@pytest.mark.parametrize("flag", [*PLANNED, *MEASURED])
def test_measuring_changes_no_bit(te_lab: Lab, flag: str) -> None:
    plain = run(te_lab, flag)
    collected = run(te_lab, flag, *COLLECT_ONLY)
    assert weights(collected) == weights(plain)
    assert logged(collected) == logged(plain)
    assert logged(collected, "grad norm") == logged(plain, "grad norm")
    assert measurements(collected) == ["3.json"]


@pytest.mark.parametrize("flag", PLANNED)
def test_beside_a_frozen_plan_a_measurement_leaves_no_trace(
    te_lab: Lab, flag: str, tmp_path: Path
) -> None:
    collected = run(te_lab, flag, *COLLECT_ONLY)
    problem = str(collected.output / "problems" / "3.json")
    plan = str(tmp_path / "plan.json")
    assert main(["plan", problem, "--target", "0.5", "--output", plan]) == 0
    frozen = [*COLLECT_ONLY, "--snip-plan-file", plan]
    alone = run(te_lab, flag, *frozen, *NEVER)
    measured = run(te_lab, flag, *frozen)
    assert logged(alone) != logged(collected)
    assert weights(alone) == weights(measured)
    assert logged(alone) == logged(measured)
    assert (measurements(alone), measurements(measured)) == ([], ["3.json"])


@pytest.mark.parametrize("flag", [*PLANNED, *MEASURED])
def test_whatever_fails_in_a_refresh_all_ranks_train_on_under_the_plan(
    te_lab: Lab, flag: str
) -> None:
    """The first refresh makes the plan, though it finds the disk full. All later ones fail."""
    length = [*SMALL, "--train-iters", str(faults.NUM_ITERATIONS)]
    snip = [*SNIP, *faults.SNIP]
    faulty = run(te_lab, flag, *snip, length=length, with_faults=True)
    undisturbed = run(te_lab, flag, *snip, "--snip-interval", "100", length=length)
    assert weights(faulty) == weights(undisturbed)
    assert logged(faulty) == logged(undisturbed)
    assert logged(faulty, "grad norm") == logged(undisturbed, "grad norm")
    wanted = [
        reason
        for fault, reason in faults.REASONS.items()
        if flag in PLANNED or fault in faults.OF_A_MEASUREMENT
    ]
    leader, other = (
        [line for line in log.splitlines() if ": keeping " in line] for log in faulty.logs
    )
    assert len(leader) == len(wanted), faulty.report
    assert all(reason in line for reason, line in zip(wanted, leader, strict=True)), leader
    assert other == []
    full = [line for log in faulty.logs for line in log.splitlines() if "No space left" in line]
    assert len(full) == 1, full
    plans = [4] if flag in PLANNED else []
    assert applied_plans(faulty) == applied_plans(undisturbed) == plans, faulty.report
    assert "3.json" not in measurements(faulty)

"""What SNIP promises, under each fast flag that it accepts (patches/fast_flags.py), on two ranks.

Measuring changes no bit of the job; beside a frozen plan it leaves no trace; and when it fails on
one rank, all ranks train on alike. What is kept in memory is tested in
tests/te/test_te_stored_weights.py: one BF16 weight at a time while stored weights are measured, and
one copy of each whose option is not the job's.
"""

from pathlib import Path
from typing import NamedTuple

import pytest

from megatron_snip.__main__ import main
from megatron_snip.patches.fast_flags import FAST_FLAGS
from tests.distributed.launch import Run
from tests.megatron.lab import COLLECT_ONLY, Lab, logged, snip_lines, weights
from tests.megatron.test_expert_overlap import DELAYED, OVERLAP, STREAMS
from tests.megatron.test_graphs import GRAPH, GRAPHS
from tests.megatron.test_stored_weights import GATHERED_BF16, MXFP8, NVFP4, SHORT, STORED


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
        [*MXFP8, *DELAYED],
        BF16_FP8,
    ),
    "--overlap-moe-expert-parallel-comm in an FP8 or FP4 run": Job(
        "te ep2",
        [*MXFP8, *OVERLAP],
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
    "CUDA graphs with --snip-backend simulate or --transformer-impl local": "test_graphs.py",
    # A measured iteration runs these MLPs unfused, which rounds otherwise.
    "--use-transformer-engine-op-fuser": "../te/test_te_fused_mlp.py",
    # No CPU has these buffers.
    "--tp-comm-overlap": "../unit/patches/test_overlap_buffers.py",
    # Its dispatcher needs a GPU; a stand-in overflows.
    "--moe-expert-rank-capacity-factor": "test_expert_capacity.py",
}
"""Flag -> where it is tested."""
NEVER = ("--snip-start-step", "100")


def run(lab: Lab, flag: str, *snip: str, failing: bool = False) -> Run:
    job = {**PLANNED, **MEASURED}[flag]
    environment = {**STREAMS} if job.layout == "te ep2" else {}
    if failing:
        environment["TINY_FAIL"] = "1"
    formats = job.formats if snip else ()
    return lab.run(job.layout, [*job.flags, *SHORT, *snip, *formats], environment)


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
def test_beside_a_frozen_plan_a_measurement_leaves_no_trace_nor_does_one_that_fails(
    te_lab: Lab, flag: str, tmp_path: Path
) -> None:
    collected = run(te_lab, flag, *COLLECT_ONLY)
    problem = str(collected.output / "problems" / "3.json")
    plan = str(tmp_path / "plan.json")
    assert main(["plan", problem, "--target", "0.5", "--output", plan]) == 0
    frozen = [*COLLECT_ONLY, "--snip-plan-file", plan]
    alone = run(te_lab, flag, *frozen, *NEVER)
    measured = run(te_lab, flag, *frozen)
    failed = run(te_lab, flag, *frozen, failing=True)
    assert logged(alone) != logged(collected)
    assert weights(alone) == weights(measured) == weights(failed)
    assert logged(alone) == logged(measured) == logged(failed)
    assert (measurements(alone), measurements(measured)) == ([], ["3.json"])
    assert measurements(failed) == []
    assert any("this measurement fails" in line for line in snip_lines(failed)), failed.report

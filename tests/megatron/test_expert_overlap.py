"""`--overlap-moe-expert-parallel-comm`: a microbatch's forward runs among another's backward."""

import json

import pytest

from tests.megatron.fast_flags import DELAYED_WGRAD, EXPERT_OVERLAP, STREAMS
from tests.megatron.lab import COLLECT_ONLY, SNIP, Lab, applied_plans, logged, numbers

FP8 = ["--fp8-format", "e4m3", "--fp8-recipe", "mxfp8", "--train-iters", "6", "--num-layers", "2"]
PLANS = [*FP8, *SNIP, "--snip-formats", "bf16,fp8"]


def test_statistics_are_those_of_megatrons_ordinary_schedule(te_lab: Lab) -> None:
    folders = [
        te_lab.run("te ep2", [*FP8, *overlap, *COLLECT_ONLY], STREAMS).output / "divergences"
        for overlap in (EXPERT_OVERLAP, [])
    ]
    found, expected = (
        dict(numbers(json.loads((folder / "3.json").read_text()), "")) for folder in folders
    )
    assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    "overlap", [EXPERT_OVERLAP, DELAYED_WGRAD], ids=["overlap", "delayed wgrad"]
)
def test_plans_run_as_in_the_ordinary_schedule(te_lab: Lab, overlap: list[str]) -> None:
    """Some experts in BF16: their input must outlive the forward."""
    run = te_lab.run("te ep2", [*PLANS, *overlap], STREAMS)
    truth = te_lab.run("te ep2", PLANS, STREAMS)
    run.finished()
    assert applied_plans(run) == applied_plans(truth) == [5], run.report
    assert {i: float(x) for i, x in logged(run).items()} == pytest.approx(
        {i: float(x) for i, x in logged(truth).items()}, rel=1e-4
    )

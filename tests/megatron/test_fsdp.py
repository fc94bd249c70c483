"""FSDP in Megatron's own `pretrain`: PyTorch's FSDP2 and Megatron-FSDP, each on two ranks."""

import json
from collections.abc import Iterator

import pytest

from megatron_snip.patches.checkpoint import read_fsdp_state
from megatron_snip.run.state import RunState
from tests.distributed.launch import Run
from tests.megatron.lab import (
    COLLECT_ONLY,
    ITERATIONS,
    SNIP,
    Lab,
    applied_plans,
    killed,
    logged,
    numbers,
    resumed,
    snip_lines,
    weights,
)

LAYOUTS = ("fsdp2", "megatron-fsdp")

FROZEN = ["--lr", "1e-30", "--min-lr", "0", "--train-iters", "3"]
"""No weight changes, so runs under DDP and FSDP measure the same weights."""

RTOL = 1e-3
"""FSDP adds gradients in another precision and order, which Adam's moments keep. What does not
depend on the moments is bitwise equal: more than half of the numbers."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_measuring_changes_no_bit(lab: Lab, layout: str) -> None:
    plain = lab.run(layout)
    collected = lab.run(layout, COLLECT_ONLY)
    assert weights(collected) == weights(plain)
    assert logged(collected) == logged(plain)
    assert logged(collected, "grad norm") == logged(plain, "grad norm")
    assert sorted(p.name for p in (collected.output / "problems").iterdir()) == ["3.json", "7.json"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_statistics_are_those_of_ddp(lab: Lab, layout: str) -> None:
    """Also the norms of weights, gradients and updates, which come from shards."""
    found = dict(measured(lab.run(layout, [*COLLECT_ONLY, *FROZEN])))
    expected = dict(measured(lab.run("dp2", [*COLLECT_ONLY, *FROZEN])))
    assert found.keys() == expected.keys()
    errors = {key: abs(found[key] - value) / (abs(value) or 1) for key, value in expected.items()}
    assert {key: error for key, error in errors.items() if error > RTOL} == {}
    assert 0 < sum(error > 0 for error in errors.values()) < len(errors) / 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_plans_run_on_gathered_weights(lab: Lab, layout: str) -> None:
    plain = logged(lab.run(layout))
    run = lab.run(layout, SNIP)
    run.finished()
    assert applied_plans(run) == [5, 9], run.report
    losses = logged(run)
    assert [losses[i] for i in range(1, 5)] == [plain[i] for i in range(1, 5)]
    assert losses[5] != plain[5]
    assert float(losses[ITERATIONS]) < float(losses[1]) - 0.5
    precision = json.loads((run.output / "precision" / "5.json").read_text())
    assert {row["weight_storage"] for row in precision["linears"]} == {"bfloat16"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_transformer_engine_runs_plans_on_gathered_weights(te_lab: Lab, layout: str) -> None:
    layout = f"te {layout}"
    plain = te_lab.run(layout)
    collected = te_lab.run(layout, COLLECT_ONLY)
    assert weights(collected) == weights(plain)
    assert logged(collected) == logged(plain)
    run = te_lab.run(layout, [*SNIP, "--snip-formats", "bf16,fp8"])
    run.finished()
    assert applied_plans(run) == [5, 9], run.report
    assert logged(run)[4] == logged(plain)[4]
    assert logged(run)[5] != logged(plain)[5]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_plan_that_breaks_an_iteration_is_reverted_without_a_trace(lab: Lab, layout: str) -> None:
    run = lab.run(layout, SNIP, {"TINY_BREAK": "1"})
    assert weights(run) == weights(lab.run(layout))
    assert "reverted" in run.logs[0], run.report


@pytest.mark.parametrize("layout", ["one megatron-fsdp", "te megatron-fsdp"])
def test_a_killed_run_resumes_with_its_plan(lab: Lab, te_lab: Lab, layout: str) -> None:
    """On one rank; and on two with Transformer Engine's optimizer.

    PyTorch's has no state for a weight of which a rank has no element. With it ranks of Megatron
    0.19 wait for each other forever when they save.
    """
    own = te_lab if layout.startswith("te") else lab
    uninterrupted = own.planned(layout)
    again = resumed(own, layout, killed(own, layout))
    assert weights(again) == weights(uninterrupted)
    assert any("training resumes after iteration 7 with" in line for line in snip_lines(again))
    assert applied_plans(again) == [9]


def test_a_checkpoint_of_torch_fsdp2_holds_the_plan(lab: Lab) -> None:
    """Megatron 0.19 itself cannot load what it has saved in this format."""
    folder = killed(lab, "fsdp2")
    state = RunState.from_dict(read_fsdp_state(folder / "iter_0000007"))
    assert state.iteration == 7 and state.solve is not None
    plan = json.loads((folder / "snip" / "plans" / "3.json").read_text())
    assert state.plan.digest == plan["digest"]


def measured(run: Run) -> Iterator[tuple[str, float]]:
    """Yield every number of the first measurement and of its health, with its place."""
    run.finished()
    for folder in ("divergences", "health"):
        yield from numbers(json.loads((run.output / folder / "3.json").read_text()), folder)

"""Observing changes nothing: training that is observed is bitwise the same.

BF16 compute, dropout on, FP4 with stochastic rounding in the plan; a refresh every 5 of 30 steps,
the first before the optimizer has any state. With `collect_only` it is bitwise Megatron's.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.layouts import (
    EP2,
    OVERLAP,
    PP2,
    RECOMPUTE,
    SP,
    TP2,
    VPP,
    OnRanks,
    names,
    results_on,
)
from tests.distributed.small_model import NARROW, layout, save_random_plan

WORKER = "tests.distributed.test_frozen:with_and_without"
TWO = {
    "tp": TP2,
    "tp sp": {**TP2, **SP},
    "tp recompute": {**TP2, **RECOMPUTE},
    "tp other seed": {**TP2, "seed": 7},
    "pp": {**PP2, "num_layers": 2},
    "vpp": {**VPP, "num_layers": 4},
    "dp distributed optimizer": OVERLAP,
    "ep": {"num_experts": 4, **EP2},
}
MODEL = {**NARROW, "num_layers": 1, "seq_length": 32, "bf16": True}
MODEL |= {"attention_dropout": 0.1, "hidden_dropout": 0.1}
STEPS = 30


def with_and_without(values: dict[str, Any], folder: str) -> dict[str, Any]:
    """On ranks: train under a frozen plan, observed and not; and with no plan at all.

    Observed under a policy's plan, and not observed under the same plan from a file; and with
    `collect_only` against Megatron's own loop.
    """
    values = {**MODEL, **values}
    file = Path(folder) / "plan.json"
    with layout(values) as trainer:
        save_random_plan(trainer, file)
    frozen = {"collect_only": True, "plan_file": file}
    observed = {"interval": 5, "start_step": 3}
    return {
        "with": _train(values, {**frozen, **observed}),
        "without": _train(values, {**frozen, "start_step": STEPS + 1}),
        "collecting": _collect(values, {"collect_only": True, "interval": 4, "start_step": 2}),
        "megatron": _collect(values, None),
    }


def _collect(values: dict[str, Any], snip: dict[str, Any] | None) -> dict[str, Any]:
    """Train under SNIP, or with Megatron alone."""
    with layout(values) as trainer:
        if snip is None:
            trainer.advance(10)
        else:
            trainer.run(10, snip)
        return {**trainer.digests(), "refreshes": len(trainer.events.measured)}


def _train(values: dict[str, Any], snip: dict[str, Any]) -> dict[str, Any]:
    print(values, snip, flush=True)  # the progress of a run that hangs
    with layout(values) as trainer:
        controller = trainer.controller(snip)
        applied = [(i, a.plan.digest, a.num_changed) for i, a in trainer.events.applied]
        trainer.advance(STEPS, controller)
        controller.close()
        statistics = [m.divergences.statistics for _, m in trainer.events.measured]
        return {
            **trainer.digests(),
            "refreshes": [s.iteration for s in statistics],
            "errors": [s.linears[-1].formats["fp4"].grad_error_square for s in statistics],
            "options": sorted({str(option) for option in controller.plan.linears.values()}),
            "warnings": trainer.warnings,
            "applied": applied,
            "digest": controller.plan.digest,
        }


def check_no_trace(result: dict[str, Any]) -> None:
    with_refreshes, without = result["with"], result["without"]
    assert with_refreshes["refreshes"] == [3, 8, 13, 18, 23, 28]
    assert without["refreshes"] == []
    assert all(value > 0 for value in with_refreshes["errors"])
    assert with_refreshes["options"] == without["options"] == ["fp4", "fp8"]
    assert with_refreshes["warnings"] == without["warnings"] == []
    ((iteration, digest, num_changed),) = with_refreshes["applied"]  # the plan is reported once
    assert (iteration, digest) == (1, with_refreshes["digest"]) and num_changed > 0
    assert without["applied"] == with_refreshes["applied"]
    for bits in ("losses", "weights", "optimizer"):
        assert with_refreshes[bits] == without[bits], bits
        assert result["collecting"][bits] == result["megatron"][bits], bits
    assert (result["collecting"]["refreshes"], result["megatron"]["refreshes"]) == (3, 0)
    assert len(set(without["losses"])) == STEPS  # it did train


one_rank = results_on(1, WORKER, {"one": {}}, folder=True)
two_ranks = results_on(2, WORKER, TWO, folder=True)


@pytest.mark.slow
def test_refreshes_leave_no_trace_on_one_rank(one_rank: OnRanks) -> None:
    check_no_trace(one_rank("one")[0])


@pytest.mark.parametrize("name", names(TWO, ["tp sp", "dp distributed optimizer"]))
def test_refreshes_leave_no_trace_on_two_ranks(two_ranks: OnRanks, name: str) -> None:
    for result in two_ranks(name):
        check_no_trace(result)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "other"), [("tp", "tp recompute"), ("tp", "tp other seed")])
def test_recomputed_layers_draw_the_same_dropout_and_another_seed_does_not(
    two_ranks: OnRanks, name: str, other: str
) -> None:
    for one, two in zip(two_ranks(name), two_ranks(other), strict=True):
        for bits in ("losses", "weights", "optimizer"):
            equal = one["without"][bits] == two["without"][bits]
            assert equal == (other == "tp recompute"), bits

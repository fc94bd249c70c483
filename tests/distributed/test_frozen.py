"""Observing changes nothing: training that is observed is bitwise the same.

BF16 compute, dropout on, FP4 with stochastic rounding in the plan; a refresh every 5 of 30 steps,
the first before the optimizer has any state. With `collect_only` it is bitwise Megatron's.
"""

from typing import Any

import pytest

from tests.distributed.launch import run_ranks
from tests.distributed.layouts import EP2, OVERLAP, PP2, RECOMPUTE, SP, TP2, VPP, names, results_on

WORKER = "tests.distributed.workers.frozen:with_and_without"
ONE = {"plain": {}, "full recompute": RECOMPUTE}
TWO = {
    "tp": TP2,
    "tp sp": {**TP2, **SP},
    "pp": {**PP2, "num_layers": 2},
    "vpp": {**VPP, "num_layers": 4},
    "dp distributed optimizer": OVERLAP,
    "ep": {"num_experts": 4, **EP2},
}


def check(result: dict[str, Any]) -> None:
    with_refreshes, without = result["with"], result["without"]
    # A third of the linears in each of three iterations; a refresh is of the last of them.
    assert with_refreshes["refreshes"] == [5, 10, 15, 20, 25, 30]
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
    assert len(set(without["losses"])) == 30  # it did train


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    arguments = {"layouts": ONE, "folder": str(tmp_path_factory.mktemp("one"))}
    return run_ranks(1, WORKER, arguments)


two_ranks = results_on(2, WORKER, TWO, folder=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE)
def test_refreshes_leave_no_trace_on_one_rank(one_rank: list[dict[str, Any]], name: str) -> None:
    check(one_rank[0][name])


@pytest.mark.parametrize("name", names(TWO, ["tp sp", "dp distributed optimizer"]))
def test_refreshes_leave_no_trace_on_two_ranks(two_ranks: list[dict[str, Any]], name: str) -> None:
    for result in two_ranks:
        check(result[name])


@pytest.mark.slow
def test_dropout_draws_differ_where_they_should(one_rank: list[dict[str, Any]]) -> None:
    """Recompute replays the same masks, so it is the same training; a new step draws new ones."""
    plain, recomputed = one_rank[0]["plain"]["without"], one_rank[0]["full recompute"]["without"]
    assert plain["losses"] == recomputed["losses"]

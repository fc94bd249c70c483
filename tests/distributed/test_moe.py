"""A mixture of experts trains, measures and plans alike, wherever its experts are.

What an expert computes in a training step depends on whose tokens meet in it (tiles along tokens,
random rounding), what a refresh measures does not: see megatron_snip/linears/moe_dispatch.py.
"""

from typing import Any

import pytest

from tests.distributed.launch import run_ranks
from tests.distributed.layouts import EP2, OVERLAP, SP, TP2, names, results_on
from tests.distributed.test_invariance import check_statistics

WORKER = "tests.distributed.workers.invariance:refresh_of_experts_in"
TWO: dict[str, dict[str, Any]] = {
    "dp": {},
    "ep": EP2,
    "ep allgather": {**EP2, "moe_token_dispatcher_type": "allgather"},
    "tp ep": {**TP2, **SP, **EP2, "expert_tensor_parallel_size": 1},
}
FOUR: dict[str, dict[str, Any]] = {
    "dp ep distributed optimizer": {**EP2, **OVERLAP},
    "tp dp ep": {**TP2, **SP, **EP2},
}
RTOL = 1e-3
two_ranks = results_on(2, WORKER, TWO)
four_ranks = results_on(4, WORKER, FOUR)


@pytest.fixture(scope="module")
def one_rank() -> dict[str, Any]:
    return run_ranks(1, WORKER, {"layouts": {"plain": {}}})[0]


def worst_experts(health: list[dict[str, Any]]) -> dict[str, Any]:
    """Return {linear, format and operand: the worst expert by measure}."""
    return {
        f"{row['name']} {fmt} {operand}": values["worst_expert"]
        for row in health
        for fmt, operands in row["operands"].items()
        for operand, values in operands.items()
    }


def check(result: dict[str, Any], wanted: dict[str, Any]) -> None:
    # The plan is in force from the fifth step on, and rounds other tokens together.
    assert result["losses"][:4] == pytest.approx(wanted["losses"][:4], rel=1e-6)
    assert result["losses"][4] == pytest.approx(wanted["losses"][4], rel=1e-3)
    assert list(result["divergences"]) == list(wanted["divergences"])
    for name, options in wanted["divergences"].items():
        for option, values in options.items():
            assert result["divergences"][name][option] == pytest.approx(values, rel=RTOL), name
    check_statistics(result["statistics"]["linears"], wanted["statistics"]["linears"])
    found_worst = worst_experts(result["health"])
    for name, worst in worst_experts(wanted["health"]).items():
        found = found_worst[name]
        assert found.keys() == worst.keys() and bool(worst) == ("experts" in name)
        for measure, (expert, value) in worst.items():
            assert found[measure] == [expert, pytest.approx(value, rel=RTOL, abs=5e-3)], name
    assert (result["plan"], result["history"]) == (wanted["plan"], wanted["history"])
    assert result["warnings"] == []


@pytest.mark.slow
def test_a_row_holds_all_experts_of_a_layer(one_rank: dict[str, Any]) -> None:
    rows = one_rank["plain"]["statistics"]["linears"]
    assert list(rows)[2:4] == [f"decoder.layers.0.mlp.experts.linear_fc{i}" for i in (1, 2)]
    tokens = 4 * 512  # microbatches of one sample
    for name, row in rows.items():
        # Two of four experts see each token, and each expert is shown every microbatch.
        assert row["tokens"] == tokens * (2 if "experts" in name else 1)
        assert row["microbatches"] == (4 * 4 if "experts" in name else 4)
    plan = one_rank["plain"]["plan"]
    assert set(plan) == set(rows) and set(plan.values()) == {"fp4", "fp8"}
    assert one_rank["plain"]["losses"][0] > one_rank["plain"]["losses"][2]


@pytest.mark.parametrize("name", names(TWO, []))
def test_two_ranks_measure_and_plan_as_one(
    one_rank: dict[str, Any], two_ranks: list[dict[str, Any]], name: str
) -> None:
    for result in two_ranks:
        check(result[name], one_rank["plain"])
    assert two_ranks[0][name]["statistics"] == two_ranks[1][name]["statistics"]
    shared = name == "dp"
    own = [result[name]["experts"] for result in two_ranks]
    assert own == ([[0, 1, 2, 3]] * 2 if shared else [[0, 1], [2, 3]])


@pytest.mark.parametrize("name", names(FOUR, []))
def test_four_ranks_measure_and_plan_as_one(
    one_rank: dict[str, Any], four_ranks: list[dict[str, Any]], name: str
) -> None:
    for result in four_ranks:
        check(result[name], one_rank["plain"])

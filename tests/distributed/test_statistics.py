"""Statistics of sharded linears, and D out of Megatron's optimizers."""

from typing import Any

import pytest

from tests.distributed.launch import run_ranks
from tests.distributed.layouts import OVERLAP, SHARDED
from tests.unit.statistics.equations import Toy, largest_error
from tests.unit.statistics.test_health import check_health

WORKERS = "tests.distributed.workers.statistics"
TOYS: dict[str, dict[str, Any]] = {
    "column": {"kind": "column", "axis": "tensor"},
    "row": {"kind": "row", "axis": "tensor"},
    "column, tokens split": {"kind": "column", "axis": "tensor", "split": True},
    "data": {"kind": "row", "axis": "data"},
}
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp32": ("FP32Optimizer", {}),
    "fp32 distributed": ("DistributedOptimizer", SHARDED),
    "bf16": ("Float16OptimizerWithFloat16Params", {"bf16": True}),
    "bf16 distributed": ("DistributedOptimizer", {"bf16": True, **SHARDED}),
    "bf16 distributed, overlapped": ("DistributedOptimizer", {"bf16": True, **OVERLAP}),
}


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    layouts = {name: layout for name, (_, layout) in OPTIMIZERS.items()}
    return run_ranks(2, f"{WORKERS}:all_checks", {"cases": TOYS, "layouts": layouts})


@pytest.mark.parametrize("name", TOYS)
def test_shards_of_two_ranks_add_up(results: list[dict[str, Any]], name: str) -> None:
    """Against the equations in FP64 NumPy that one rank is tested against."""
    found = results[0]["toys"][name]
    assert found == results[1]["toys"][name]
    toy = Toy.make(TOYS[name]["kind"], microbatches=4)
    assert largest_error(found["row"], toy.wanted()) < 2e-5
    check_health(found["health"]["linears"][0], toy)


def test_every_optimizer_of_megatron_gives_the_same_d(results: list[dict[str, Any]]) -> None:
    for result in (r["sensitivities"] for r in results):
        for name, (wanted, _) in OPTIMIZERS.items():
            found = result[name]
            assert wanted in found["classes"], found["classes"]
            assert (found["before"], found["count"]) == (0, 4), name
            # A range put in the wrong place is off by 1.
            assert found["difference"] < (2.0**-8 if name.startswith("bf16") else 1e-4), name

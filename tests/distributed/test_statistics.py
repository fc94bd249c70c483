"""Statistics of sharded linears, and D out of Megatron's optimizers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.launch import run_ranks
from tests.unit.statistics.toy import Toy, errors

WORKERS = "tests.distributed.workers.statistics"
TOYS: dict[str, dict[str, Any]] = {
    "column": {"kind": "column", "axis": "tensor"},
    "gated": {"kind": "column", "num_chunks": 2, "axis": "tensor"},
    "row": {"kind": "row", "axis": "tensor"},
    "column sp": {"kind": "column", "axis": "tensor", "sequence_parallel": True},
    "gated sp": {"kind": "column", "num_chunks": 2, "axis": "tensor", "sequence_parallel": True},
    "data": {"kind": "row", "axis": "data"},
}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp32 distributed": {"use_distributed_optimizer": True},
    "bf16": {"bf16": True},
    "bf16 distributed": {"bf16": True, "use_distributed_optimizer": True},
    "bf16 distributed, overlapped": {"bf16": True, "use_distributed_optimizer": True, **OVERLAP},
}
CLASSES = {
    "fp32": "FP32Optimizer",
    "fp32 distributed": "DistributedOptimizer",
    "bf16": "Float16OptimizerWithFloat16Params",
    "bf16 distributed": "DistributedOptimizer",
    "bf16 distributed, overlapped": "DistributedOptimizer",
}


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    arguments = {"cases": TOYS, "layouts": OPTIMIZERS}
    return run_ranks(2, f"{WORKERS}:all_checks", arguments, timeout_s=200)


def test_shards_of_two_ranks_add_up_to_the_whole(results: list[dict[str, Any]]) -> None:
    """Against the same equations in FP64 NumPy that one rank is tested against."""
    assert results[0]["toys"] == results[1]["toys"]
    for name, case in TOYS.items():
        found = results[0]["toys"][name]
        wanted = Toy.make(case["kind"], case.get("num_chunks", 1), num_batches=4).wanted()
        off = {key: e for key, e in errors(found["row"], wanted).items() if e > 2e-5}
        assert not off, name
        # Data ranks bring 2.0 and 3.0; of a tensor axis one rank speaks.
        assert found["loss"] == (2.5 if case["axis"] == "data" else 2.0)


def test_a_rank_that_cannot_measure_stays_in_step_and_all_hear_of_it(
    results: list[dict[str, Any]],
) -> None:
    first, second = (result["failing"] for result in results)
    assert first == second
    assert set(first) == {"column", "row"}
    for text in first.values():
        assert text.startswith("pass A failed on rank 1: decoder.layers.3.mlp.linear_fc1: Runtime")
        assert "rank 0" not in text


def test_signs_are_those_of_the_whole_weight(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["signs"] == dict.fromkeys(("column 1", "column 2", "row 1"), 0.0)


def test_every_optimizer_of_megatron_gives_the_same_d(results: list[dict[str, Any]]) -> None:
    for result in results:
        for name, wanted in CLASSES.items():
            found = result["sensitivities"][name]
            assert wanted in found["classes"], found["classes"]
            assert found["empty"], name
            assert found["count"] == 4
            # A BF16 D may round to its neighbour; a range put in the wrong place is off by 1.
            tolerance = 2.0**-8 if name.startswith("bf16") else 1e-4
            assert max(found["errors"].values()) < tolerance, (name, found["errors"])
        assert result["sensitivities"]["fp32"]["formula"] < 1e-5

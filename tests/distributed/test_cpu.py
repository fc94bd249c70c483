"""What the CPU layer changes for gloo: collectives, and pipeline outputs that are being sent."""

from __future__ import annotations

import pytest

from tests.distributed.launch import run_ranks


def test_gloo_serves_uneven_shapes_and_tensor_splits() -> None:
    results = run_ranks(2, "tests.distributed.workers.cpu_patch:uneven_collectives")
    for rank, result in enumerate(results):
        assert result["gathered"] == [[1.0], [2.0]]
        # sum over ranks s of (10 r + s): 20 r + 1
        assert result["sum"] == [[20.0 * rank + 1.0] * 2] * (rank + 1)
        assert result["received"] == [float(rank), 10.0 + rank]


@pytest.mark.slow
def test_an_interleaved_pipeline_frees_no_output_that_gloo_still_sends() -> None:
    worker = "tests.distributed.workers.cpu_patch:interleaved_pipeline"
    expected = run_ranks(2, worker, {"deallocate": False})
    assert run_ranks(2, worker, {"deallocate": True}) == expected
    (losses,) = [result["losses"] for result in expected if result["losses"]]
    assert len(losses) == 8 and all(0 < loss < 10 for loss in losses)

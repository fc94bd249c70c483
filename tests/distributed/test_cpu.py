"""The collectives that the CPU patch adds to gloo."""

from __future__ import annotations

from tests.distributed.launch import run_ranks


def test_gloo_serves_uneven_shapes_and_tensor_splits() -> None:
    results = run_ranks(2, "tests.distributed.workers.cpu_patch:uneven_collectives")
    for rank, result in enumerate(results):
        assert result["gathered"] == [[1.0], [2.0]]
        # sum over ranks s of (10 r + s): 20 r + 1
        assert result["sum"] == [[20.0 * rank + 1.0] * 2] * (rank + 1)
        assert result["received"] == [float(rank), 10.0 + rank]

"""What the CPU layer changes for gloo: pipeline outputs stay until they are sent."""

import pytest

from tests.distributed.launch import run_ranks


@pytest.mark.slow
def test_an_interleaved_pipeline_frees_no_output_that_gloo_still_sends() -> None:
    worker = "tests.distributed.workers.cpu_patch:interleaved_pipeline"
    expected = run_ranks(2, worker, {"deallocate": False})
    assert run_ranks(2, worker, {"deallocate": True}) == expected
    (losses,) = [result["losses"] for result in expected if result["losses"]]
    assert len(losses) == 8 and all(0 < loss < 10 for loss in losses)

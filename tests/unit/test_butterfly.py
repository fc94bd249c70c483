"""Which sums go by exchanges; the exchanges themselves need ranks (tests/distributed)."""

from __future__ import annotations

import pytest

from benchmarks.refresh_model import JOBS, Job, costs
from megatron_snip.butterfly import LARGEST_BYTES, largest_bytes


def test_few_ranks_send_what_is_large_around_a_ring() -> None:
    assert largest_bytes(2) == largest_bytes(8) == LARGEST_BYTES


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_the_statistics_of_a_large_job_go_by_exchanges(job: Job) -> None:
    """As the model of a refresh counts them: a ring of 16,384 ranks takes seconds."""
    assert costs(job, 3.0, 1e-4)["table_bytes"] <= largest_bytes(job.gpus)

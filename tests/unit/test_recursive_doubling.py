"""Which sums go by exchanges; the exchanges themselves need ranks (tests/distributed)."""

from __future__ import annotations

from megatron_snip.recursive_doubling import LARGEST_BYTES, largest_bytes


def test_few_ranks_send_what_is_large_around_a_ring() -> None:
    assert largest_bytes(2) == largest_bytes(8) == LARGEST_BYTES

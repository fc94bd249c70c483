"""Seconds at more ranks, computed from what fewer ranks measured."""

import math

import pytest

from benchmarks.scale import computed

HOP_S, BANDWIDTH = 1e-4, 1e9


def phase(cpu_s: float, num_bytes: float = 0.0) -> dict[str, float]:
    return {"exchanges": 3.0, "bytes": num_bytes, "cpu_s": cpu_s}


def test_only_what_grew_with_the_ranks_grows() -> None:
    levels = 14
    hops_s = 3 * 2 * levels * HOP_S
    grows = {ranks: phase(0.2 + 0.01 * math.log2(ranks)) for ranks in (8, 16, 32)}
    assert computed(grows, 16384, HOP_S, BANDWIDTH) == pytest.approx(hops_s + 0.2 + 0.14)
    falls = {8: phase(0.3), 32: phase(0.2)}  # another load: the mean, and no growth
    assert computed(falls, 16384, HOP_S, BANDWIDTH) == pytest.approx(hops_s + 0.25)
    # Bytes grow with the number of levels, and so does all CPU time that was measured once.
    one = {32: phase(0.1, num_bytes=5e7)}
    assert computed(one, 16384, HOP_S, BANDWIDTH) == pytest.approx(hops_s + 14 / 5 * (0.05 + 0.1))

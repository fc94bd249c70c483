"""JSON between ranks, and one decision for all."""

from fractions import Fraction

import pytest

from tests.distributed.launch import run_ranks


def test_small_sums_are_right_and_the_same_bits_on_any_number_of_ranks() -> None:
    """FP64 against exact rational sums; sizes that are powers of two and such that are not."""
    results = run_ranks(6, "tests.distributed.workers.collectives:recursive_doubling_checks")
    for size in range(1, 7):
        found = [result[str(size)] for result in results[:size]]
        exact = [sum(Fraction(r["given"][i]) for r in found) for i in range(len(found[0]["given"]))]
        for one in found:
            assert one["sum"] == found[0]["sum"]
            assert one["sum"] == pytest.approx([float(v) for v in exact], rel=1e-14)
            assert one["flags"] == size * (size - 1) // 2
            assert one["ring"] == pytest.approx(one["sum"], rel=1e-14)
    assert all(result["large"] == 6 * 15.0 for result in results)
    # Whoever is ahead is not heard for another: no sum at all, and no hang. The rank that times out
    # first closes its connection; the other may see that before its own limit.
    said = [result["out of step"] for result in results[:2]]
    assert not any(one.isdigit() for one in said), said
    assert any("imed out" in one for one in said), said

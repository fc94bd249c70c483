"""How many operations measuring starts on a GPU, counted on the observer's own path.

The tensors have no numbers: an operation that waits for one fails.
"""

import pytest

pytest.importorskip("triton")

from benchmarks.launches import of_linear

MOST_OF_LINEAR = 12


@pytest.mark.parametrize("kind", ["column", "row"])
def test_a_linear_in_two_formats_reads_each_operand_once(kind: str) -> None:
    found = of_linear(kind=kind)
    assert found.total <= MOST_OF_LINEAR, found.names
    assert found.names["observe_kernel"] == 3
    weight, tokens = 4096 * 4096, 8192 * 4096
    # The sampled rows are taken from X, W and G, whose bytes count in full, and are read again.
    assert found.num_bytes < 2 * (3 * weight + 2 * tokens) * 1.25


def test_w_is_measured_in_the_first_microbatch_alone() -> None:
    found = of_linear(microbatch=1)
    assert found.names["observe_kernel"] == 2
    assert found.total < of_linear().total
    assert found.num_bytes < 2 * (2 * 8192 * 4096) * 1.25


def test_two_more_formats_cost_three_launches_of_one_kernel() -> None:
    names = ("fp8", "fp4", "fp3", "fp8_blockwise")
    two, four = (of_linear(names[:count]) for count in (2, 4))
    assert four.names - two.names == {"observe_kernel": 3}

"""How many operations measuring starts on a GPU, counted on the observer's own path.

The tensors have no numbers: an operation that waits for one fails.
"""

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.launches import of_linear, of_state

MOST_OF_LINEAR = 30
MOST_OF_STATE = 8


@pytest.mark.parametrize("kind", ["column", "row"])
def test_a_linear_in_two_formats(kind: str) -> None:
    found = of_linear(kind=kind)
    assert found.total <= MOST_OF_LINEAR, found.names


def test_more_formats_cost_launches_of_one_kernel_alone() -> None:
    names = ("fp8", "fp4", "fp3", "fp8_blockwise")
    two, four = (of_linear(names[:count]) for count in (2, 4))
    assert four.names - two.names == {"observe_kernel": 5}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_state_of_a_weight_is_read_once(dtype: torch.dtype) -> None:
    found = of_state(dtype)
    assert found.total <= MOST_OF_STATE, found.names
    elements = 4096 * 4096
    assert found.num_bytes / elements < 2 * dtype.itemsize + 0.5

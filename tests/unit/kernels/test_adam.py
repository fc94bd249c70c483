"""The kernels for AdamW's moments against PyTorch: in Triton's interpreter, or on a GPU.

As in test_bits.py, without a GPU these tests run in a process of their own.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron_snip.kernels import launch
from megatron_snip.statistics import optimizer_state
from megatron_snip.statistics.optimizer_state import Shard
from megatron_snip.statistics.sensitivity import ShardSums

DEVICE = "cuda" if torch.cuda.is_available() and not launch.interpreting() else "cpu"

if DEVICE == "cpu" and not launch.interpreting():
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

# NumPy on NaN, in the interpreter
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

GROUP: Mapping[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "lr": 3e-4}
TOLERANCE = 5e-6  # PyTorch adds longer runs in FP32 than the kernels do


def shard_of(shape: tuple[int, int], start: int, end: int, dtype: torch.dtype) -> Shard:
    """Elements [start, end) of a weight; second moments of rows differ by 2^30."""
    generator = torch.Generator().manual_seed(shape[0] * shape[1])
    first = torch.randn(shape, generator=generator)
    second = torch.randn(shape, generator=generator).square()
    second *= torch.exp2(torch.randint(-30, 1, (shape[0], 1), generator=generator))
    parts = [x.flatten()[start:end].to(DEVICE, dtype) for x in (first, second)]
    state = {"exp_avg": parts[0], "exp_avg_sq": parts[1], "step": 7}
    weight = torch.zeros(shape, device=DEVICE)
    return Shard(start, end, weight, weight.shape, state, GROUP, optimizer_state._adam)


def both(shard: Shard) -> list[ShardSums]:
    """Return the sums by PyTorch, then those by the kernels."""
    found = []
    for kernels in (False, True):
        with patch.object(launch, "use_kernels", lambda *_, answer=kernels: answer):
            weight = torch.nn.Parameter(shard.parameter)
            found.append(ShardSums.of(weight, shard))
    return found


def sums_in_fp64(shard: Shard) -> list[torch.Tensor]:
    """Sums of the FP32 moments, all else in FP64."""
    terms = shard.adam_terms()
    assert terms is not None
    inverse = terms.offset + terms.factor * terms.second.double().sqrt()
    update = terms.scale * terms.first.double() / inverse
    squares = torch.zeros(shard.shape.numel(), dtype=torch.float64, device=DEVICE)
    squares[shard.start : shard.end] = inverse.square()
    squares = squares.view(shard.shape)
    update_square = update.square().sum()
    rate = GROUP["lr"]
    scalars = torch.stack(
        [update_square.new_tensor(len(update)), update_square, rate**2 * update_square]
    )
    return [squares.sum(1), squares.sum(0), scalars]


def assert_equal(shard: Shard) -> ShardSums:
    wanted, found = both(shard)
    for a, b, exact in zip(wanted, found, sums_in_fp64(shard), strict=True):
        assert a.dtype == b.dtype == torch.float64
        torch.testing.assert_close(b, a, rtol=TOLERANCE, atol=0, equal_nan=True)
        torch.testing.assert_close(b, exact, rtol=1e-6, atol=0, equal_nan=True)
    assert wanted.scalars[0] == found.scalars[0]
    return found


@pytest.mark.parametrize("dtype", launch.MOMENT_DTYPES[:2], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (70, 150), (33, 384), (600, 40)], ids=str)
def test_complete_weights(shape: tuple[int, int], dtype: torch.dtype) -> None:
    assert_equal(shard_of(shape, 0, shape[0] * shape[1], dtype))


@pytest.mark.parametrize("cuts", [[8], [3, 9, 10, 17], [150, 300, 1400], [1, 149, 10499]])
def test_shards_that_begin_and_end_anywhere(cuts: list[int]) -> None:
    shape = (70, 150)
    ranges = list(pairwise([0, *cuts, 70 * 150]))
    parts = [assert_equal(shard_of(shape, a, b, torch.float32)) for a, b in ranges]
    complete = assert_equal(shard_of(shape, 0, 70 * 150, torch.float32))
    for i, wanted in enumerate(complete):
        total = torch.stack([part[i] for part in parts]).sum(0)
        torch.testing.assert_close(total, wanted, rtol=TOLERANCE, atol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
@pytest.mark.parametrize("moment", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_what_is_not_finite(value: float, moment: str, eps: float) -> None:
    shard = shard_of((20, 140), 5, 2700, torch.float32)
    shard.state[moment][[0, 17, 1500, -1]] = value
    object.__setattr__(shard, "group", {**GROUP, "eps": eps})
    found = assert_equal(shard)
    assert found.rows.isfinite().all() == (value == 0.0 or moment == "exp_avg")


def test_the_same_bits_again() -> None:
    """Blocks are added in a fixed order."""
    shard = shard_of((600, 300), 7, 170000, torch.float32)
    (_, first), (_, second) = both(shard), both(shard)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))

"""The order of samples: the same global batch for every number of data-parallel ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from megatron_snip.trainer.data import DataRank, step_batches


class Numbers:
    """Sample i holds i everywhere."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        keys = ("tokens", "labels", "loss_mask", "position_ids")
        return {key: torch.full((4,), index) for key in keys}


def samples_of(rank: DataRank, step: int) -> Iterator[list[int]]:
    for batch in step_batches(Numbers(), rank, step):
        yield batch["tokens"][:, 0].tolist()


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("micro", [1, 2])
def test_ranks_share_out_the_global_batch_in_order(size: int, micro: int) -> None:
    count = 16 // (size * micro)
    for step in (0, 3):
        ranks = [list(samples_of(DataRank(r, size, micro, count), step)) for r in range(size)]
        by_microbatch = itertools.chain.from_iterable(zip(*ranks, strict=True))
        assert list(itertools.chain(*by_microbatch)) == list(range(16 * step, 16 * step + 16))


def test_a_batch_stacks_its_samples() -> None:
    (batch,) = step_batches(Numbers(), DataRank(0, 1, 3, 1), step=2)
    assert {tuple(value.shape) for value in batch.values()} == {(3, 4)}
    assert batch["labels"].tolist() == [[6] * 4, [7] * 4, [8] * 4]

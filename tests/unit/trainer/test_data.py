"""The built-in text and the order of samples."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_snip.trainer.config import TrainConfig
from megatron_snip.trainer.data import (
    END_OF_DOCUMENT,
    VALIDATION_EVERY,
    iteration_batches,
    prepare_corpus,
    read_documents,
)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    root = tmp_path / "library"
    for index in range(50):
        file = root / f"package{index % 3}" / f"module{index:02}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(f"value = {index}\n".encode() * (index + 1))
    for excluded in ("test", "site-packages", "__pycache__"):
        (root / excluded).mkdir()
        (root / excluded / "extra.py").write_text("no = 1\n")
    (root / "empty.py").touch()
    (root / "notes.txt").write_text("not Python")
    return root


def test_a_size_limit_takes_a_fixed_sample_of_the_modules(library: Path) -> None:
    every = read_documents(library, 10**6)
    assert len(every) == 50 and list(every) == sorted(every)
    some = read_documents(library, 4000)
    assert 0 < len(some) < 50 and sum(map(len, some.values())) <= 4000
    assert some == read_documents(library, 4000) and set(some) <= set(every)


def test_the_files_hold_the_bytes_of_the_documents(library: Path, tmp_path: Path) -> None:
    corpus = prepare_corpus(tmp_path / "cache", 10**6, library)
    documents = list(read_documents(library, 10**6).values())
    valid = documents[::VALIDATION_EVERY]
    for part, expected in (("valid", valid), ("train", [d for d in documents if d not in valid])):
        read = IndexedDataset(str(Path(corpus["path"]) / part))
        assert len(read) == len(expected)
        for tokens, text in zip(read, expected, strict=True):
            assert tokens[:-1].astype(np.uint8).tobytes() == text and tokens[-1] == END_OF_DOCUMENT
        assert corpus[f"{part}_tokens"] == sum(len(d) + 1 for d in expected)
    assert corpus["files"] == 50


class Numbers:
    """Sample i holds i."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        keys = ("tokens", "labels", "loss_mask", "position_ids")
        return {key: torch.full((4,), index) for key in keys}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("micro", [1, 2])
def test_every_layout_sees_the_same_global_batch(size: int, micro: int) -> None:
    config = TrainConfig(global_batch_size=16, micro_batch_size=micro)

    def samples(rank: int, iteration: int) -> list[list[int]]:
        batches = iteration_batches(Numbers(), config, iteration, rank, size)
        return [batch["tokens"][:, 0].tolist() for batch in batches]

    for iteration in (1, 4):
        ranks = [samples(rank, iteration) for rank in range(size)]
        by_microbatch = itertools.chain.from_iterable(zip(*ranks, strict=True))
        first = 16 * (iteration - 1)
        assert list(itertools.chain(*by_microbatch)) == list(range(first, first + 16))

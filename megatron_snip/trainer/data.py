"""Samples for training and evaluation, read with Megatron's GPTDataset.

Order: step s of global batch size B takes the dataset's samples s B .. s B + B - 1 (the dataset has
shuffled them by its seed). Of these, microbatch m on data-parallel rank r of D takes the b samples
from (m D + r) b on, b being the micro batch size. So a step sees the same samples for every layout,
and a sample at a step belongs to exactly one rank.

Every rank reads its own samples; the files are memory-mapped and the same for all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from torch.distributed import ProcessGroup

from megatron_snip.collectives import attempt, broadcast_json
from megatron_snip.errors import SnipError
from megatron_snip.trainer.config import TrainConfig
from megatron_snip.trainer.corpus import cache_folder, prepare_corpus

Batch = dict[str, torch.Tensor]
"""A microbatch: tokens, labels, position_ids [b, s] int64 and loss_mask [b, s] float32."""

_KEYS = ("tokens", "labels", "loss_mask", "position_ids")


class Samples(Protocol):
    """A dataset of samples, each a mapping of [s] tensors."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]: ...


@dataclass(frozen=True)
class DataRank:
    """Which samples of a global batch a rank takes.

    Attributes:
        rank: data-parallel rank, 0-based.
        size: data-parallel ranks.
        micro_batch_size: samples in a microbatch.
        num_microbatches: microbatches a step on each rank.
    """

    rank: int
    size: int
    micro_batch_size: int
    num_microbatches: int

    @property
    def global_batch_size(self) -> int:
        """Samples a step over all ranks."""
        return self.micro_batch_size * self.num_microbatches * self.size

    def indices(self, step: int, microbatch: int) -> range:
        """Return the samples of one microbatch."""
        first = step * self.global_batch_size
        first += (microbatch * self.size + self.rank) * self.micro_batch_size
        return range(first, first + self.micro_batch_size)


class _TokenIds:
    """What GPTDataset asks of a tokenizer when the data are token ids already."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1
        self.unique_identifiers = OrderedDict(kind="token ids", vocab_size=vocab_size)


@dataclass(frozen=True)
class Datasets:
    """Training and held-out samples, and what they are made of.

    Attributes:
        train: at least train_iters * global_batch_size samples.
        valid: at least eval_iters * global_batch_size samples; None where eval_iters is 0.
        source: for the run's record, e.g. path, digest and number of tokens.
    """

    train: Samples
    valid: Samples | None
    source: dict[str, Any]


def build_datasets(config: TrainConfig, group: ProcessGroup | None) -> Datasets:
    """All ranks: prepare the data (rank 0 writes what is missing) and open it.

    Args:
        config: the run's settings.
        group: all ranks, carrying CPU tensors; None without a process group.

    Raises:
        SnipError: on every rank, if the data cannot be prepared or hold no held-out part.
    """
    if config.data_path is None:
        sources, record = _built_in_text(config, group)
    else:
        sources = {"blend": ([str(config.data_path)], None), "split": config.split}
        record = {"path": str(config.data_path), "split": config.split}
    samples = config.train_iters * config.global_batch_size
    held_out = config.eval_iters * config.global_batch_size
    settings = GPTDatasetConfig(
        random_seed=config.seed,
        sequence_length=config.seq_length,
        # Indices are small and belong to this run's length and seed; a shared folder would let
        # two runs read each other's half-written files.
        path_to_cache=str(config.run_dir / "data_index"),
        tokenizer=_TokenIds(config.token_ids),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        **sources,
    )
    builder = BlendedMegatronDatasetBuilder(
        GPTDataset, [samples, held_out or 1, None], lambda: True, settings
    )
    train, valid, _ = builder.build()
    if train is None or (held_out and (valid is None or len(valid) < held_out)):
        raise SnipError(
            f"'{config.data_path}' holds no documents for "
            f"{'training' if train is None else 'validation'} under split {config.split}"
        )
    return Datasets(train, valid if held_out else None, record)


def step_batches(samples: Samples, rank: DataRank, step: int) -> Iterator[Batch]:
    """Yield the microbatches of one step on one rank, on the CPU."""
    for microbatch in range(rank.num_microbatches):
        rows = [samples[index] for index in rank.indices(step, microbatch)]
        yield {key: torch.stack([row[key] for row in rows]) for key in _KEYS}


def _built_in_text(
    config: TrainConfig, group: ProcessGroup | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """All ranks: let rank 0 prepare the standard library's text; return sources and record."""
    leader = group is None or torch.distributed.get_rank(group) == 0

    def prepare() -> dict[str, Any] | None:
        if not leader:
            return None
        folder = cache_folder(config.data_cache_path, config.run_dir / "data")
        corpus = prepare_corpus(folder.resolve(), config.max_corpus_bytes)
        return {
            "path": str(corpus.folder),
            "sha256": corpus.digest,
            "files": corpus.num_files,
            "train_tokens": corpus.train_tokens,
            "valid_tokens": corpus.valid_tokens,
        }

    record = broadcast_json(attempt("preparing the built-in text", prepare, group), group)
    folder = Path(record["path"])
    blends = [([str(folder / part)], None) for part in ("train", "valid")]
    return {"blend_per_split": [*blends, None]}, record

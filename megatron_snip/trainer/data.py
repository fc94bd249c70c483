"""Training and validation samples, read with Megatron's GPTDataset.

Iteration i (from 1) with global batch size B takes samples (i - 1) B .. i B - 1; the dataset has
shuffled them by its seed. Of these, microbatch m on data-parallel rank r of D takes the b samples
from (m D + r) b on, where b is the micro batch size. So an iteration sees the same samples in every
layout, and each sample belongs to one rank.

The built-in text is the source code of Python's standard library, so nothing is downloaded. A
document is a file: its bytes (0..255), then `END_OF_DOCUMENT`. Every 20th file is for validation.
Each run writes it to its own folder, named after the digest of all documents. The digest is in the
run's data.json too: runs with different libraries have different digests.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from torch.utils.data import default_collate

from megatron_snip.collectives import Control
from megatron_snip.trainer.config import BYTE_VOCABULARY, TrainConfig

Batch = dict[str, torch.Tensor]
"""A microbatch: tokens, labels, position_ids [b, s] int64 and loss_mask [b, s] float32."""

END_OF_DOCUMENT = 256
VALIDATION_EVERY = 20
_EXCLUDED = {
    "__pycache__",
    "dist-packages",
    "site-packages",
    "ensurepip",
    "idlelib",
    "idle_test",
    "lib2to3",
    "pydoc_data",
    "test",
    "tests",
}
"""Folders of installed packages and of test data."""


class Samples(Protocol):
    """A dataset of samples, each a mapping of [s] tensors."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]: ...


@dataclass(frozen=True)
class Datasets:
    """Training and validation samples.

    Attributes:
        train: at least train_iters * global_batch_size samples.
        valid: at least eval_iters * global_batch_size samples; None if eval_iters is 0.
        source: path, digest and number of tokens, for data.json.
    """

    train: Samples
    valid: Samples | None
    source: dict[str, Any]


def build_datasets(config: TrainConfig, control: Control) -> Datasets:
    """All ranks: prepare the data (rank 0 writes what is missing) and open it.

    Args:
        config: the run's settings.
        control: the control plane of all ranks.

    Raises:
        SnipError: on every rank, if the data cannot be prepared.
    """
    folder = (config.run_dir / "data").resolve()
    # Megatron's indices of samples. Two runs that share a folder could read each other's.
    indices = config.run_dir / "data_index"

    def prepare() -> dict[str, Any]:
        # Megatron takes an index that is there without a look at it. One of a run that a full disk
        # or a kill ended may be empty or half written, so every run makes its own.
        for stale in indices.glob("*-GPTDataset-*"):
            stale.unlink()
        return prepare_corpus(folder, config.max_corpus_bytes)

    source = control.on_rank_0("preparing the built-in text", prepare)
    tokenizer = SimpleNamespace(  # the data are token ids already
        vocab_size=BYTE_VOCABULARY,
        eod=END_OF_DOCUMENT,
        unique_identifiers={"kind": "token ids", "vocab_size": BYTE_VOCABULARY},
    )
    blends = [([str(Path(source["path"]) / part)], None) for part in ("train", "valid")]
    num_train = config.train_iters * config.global_batch_size
    num_valid = config.eval_iters * config.global_batch_size
    settings = GPTDatasetConfig(
        random_seed=config.seed,
        sequence_length=config.seq_length,
        path_to_cache=str(indices),
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        blend_per_split=[*blends, None],
    )
    builder = BlendedMegatronDatasetBuilder(
        GPTDataset, [num_train, num_valid or 1, None], lambda: True, settings
    )
    train, valid, _ = builder.build()
    return Datasets(train, valid if num_valid else None, source)


def iteration_batches(
    samples: Samples, config: TrainConfig, iteration: int, rank: int, num_ranks: int
) -> Iterator[Batch]:
    """Yield the microbatches of an iteration (1-based) on one data-parallel rank, on the CPU."""
    size = config.micro_batch_size
    end = iteration * config.global_batch_size
    for first in range(end - config.global_batch_size + rank * size, end, num_ranks * size):
        yield default_collate([samples[index] for index in range(first, first + size)])


def prepare_corpus(parent: Path, max_bytes: int, library: Path | None = None) -> dict[str, Any]:
    """Write the built-in text to a folder below `parent`; return what describes it.

    One process calls this. It takes about a second for 10 MB.

    Args:
        parent: folder of the run.
        max_bytes: size limit over all files.
        library: folder of Python files; by default the standard library of this Python.

    Returns:
        path (holds train.bin/.idx and valid.bin/.idx), sha256 (of names and contents), files,
        train_tokens, valid_tokens.

    Raises:
        OSError: if nothing can be read or written.
    """
    root = library or Path(sysconfig.get_paths()["stdlib"])
    documents = read_documents(root, max_bytes)
    if len(documents) < 2:
        raise FileNotFoundError(f"no Python files to train on below {root}")
    digest = hashlib.sha256(f"1 {VALIDATION_EVERY}".encode())
    for name, contents in documents.items():
        digest.update(name.encode() + b"\0" + hashlib.sha256(contents).digest())
    folder = parent / f"python-source-{digest.hexdigest()[:16]}"
    texts = list(documents.values())
    valid = texts[::VALIDATION_EVERY]
    train = [text for index, text in enumerate(texts) if index % VALIDATION_EVERY]
    folder.mkdir(parents=True, exist_ok=True)
    write_indexed(folder / "train", train)
    write_indexed(folder / "valid", valid)
    return {
        "path": str(folder),
        "sha256": digest.hexdigest(),
        "files": len(documents),
        "train_tokens": sum(len(text) + 1 for text in train),
        "valid_tokens": sum(len(text) + 1 for text in valid),
    }


def read_documents(root: Path, max_bytes: int) -> dict[str, bytes]:
    """Return {relative path: contents} of the Python files below `root`, in path order.

    If they hold more than `max_bytes`, files are taken by the hash of their path: a fair sample
    that does not depend on the machine.
    """
    names: list[str] = []
    for folder, subfolders, files in os.walk(root):
        # Not entered: site-packages alone can hold a hundred times the files of the library.
        subfolders[:] = [name for name in subfolders if name not in _EXCLUDED]
        paths = [Path(folder, name) for name in files if name.endswith(".py")]
        names += [path.relative_to(root).as_posix() for path in paths if path.is_file()]
    taken: dict[str, bytes] = {}
    for name in sorted(names, key=lambda name: (hashlib.sha256(name.encode()).digest(), name)):
        contents = (root / name).read_bytes()
        if contents and len(contents) <= max_bytes:
            taken[name] = contents
            max_bytes -= len(contents)
    return dict(sorted(taken.items()))


def write_indexed(prefix: Path, documents: list[bytes]) -> None:
    """Write documents as byte tokens to PREFIX.bin and PREFIX.idx, in Megatron's format."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for contents in documents:
        tokens = np.append(np.frombuffer(contents, dtype=np.uint8), np.uint16(END_OF_DOCUMENT))
        builder.add_document(tokens.astype(np.uint16), [len(tokens)])
    builder.finalize(f"{prefix}.idx")

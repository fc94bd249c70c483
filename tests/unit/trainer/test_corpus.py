"""The built-in text: which files, which tokens, and a cache that is whole or not there."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_snip.trainer.corpus import (
    END_OF_DOCUMENT,
    HELD_OUT_EVERY,
    cache_folder,
    prepare_corpus,
    read_documents,
    tokenize,
)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    root = tmp_path / "library"
    for index in range(50):
        file = root / f"package{index % 3}" / f"module{index:02}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(f"value = {index}\n".encode() * (index + 1))
    for left_out in ("test", "site-packages", "__pycache__"):
        (root / left_out).mkdir()
        (root / left_out / "extra.py").write_text("no = 1\n")
    (root / "empty.py").touch()
    (root / "notes.txt").write_text("not Python")
    return root


def test_tokens_are_bytes_and_an_end() -> None:
    text = bytes(range(256))
    tokens = tokenize(text)
    assert tokens[:-1].astype(np.uint8).tobytes() == text
    assert tokens[-1] == END_OF_DOCUMENT and len(tokens) == 257


def test_packages_tests_and_empty_files_are_left_out(library: Path) -> None:
    names = [name for name, _ in read_documents(library, 10**6)]
    assert len(names) == 50 and names == sorted(names)


def test_a_limit_takes_a_fixed_sample(library: Path) -> None:
    some = dict(read_documents(library, 4000))
    assert 0 < len(some) < 50
    assert sum(map(len, some.values())) <= 4000
    assert some == dict(read_documents(library, 4000))
    assert set(some) <= {name for name, _ in read_documents(library, 10**6)}


def test_the_files_hold_the_documents_and_whole_files_are_held_out(
    library: Path, tmp_path: Path
) -> None:
    corpus = prepare_corpus(tmp_path / "cache", 10**6, library)
    documents = [text for _, text in read_documents(library, 10**6)]
    held_out = documents[::HELD_OUT_EVERY]
    for prefix, expected in (
        (corpus.valid_prefix, held_out),
        (corpus.train_prefix, [d for d in documents if d not in held_out]),
    ):
        read = IndexedDataset(prefix)
        assert len(read) == len(expected)
        for tokens, text in zip(read, expected, strict=True):
            assert np.array_equal(tokens, tokenize(text))
    assert corpus.num_files == 50
    assert corpus.train_tokens + corpus.valid_tokens == sum(map(len, documents)) + 50


def test_the_cache_is_used_and_mended(library: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    corpus = prepare_corpus(cache, 10**6, library)
    data = Path(f"{corpus.train_prefix}.bin")
    before = data.stat()
    assert prepare_corpus(cache, 10**6, library) == corpus
    assert data.stat().st_mtime_ns == before.st_mtime_ns
    os.truncate(data, 10)
    assert prepare_corpus(cache, 10**6, library) == corpus
    assert data.stat().st_size == before.st_size
    (library / "package0" / "module00.py").write_text("changed = True\n")
    other = prepare_corpus(cache, 10**6, library)
    assert other.digest != corpus.digest and other.folder != corpus.folder
    assert sorted(p.name[0] for p in cache.iterdir()) == ["p", "p"]  # no drafts are left


def test_without_python_files_there_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "library").mkdir()
    with pytest.raises(FileNotFoundError):
        prepare_corpus(tmp_path / "cache", 10**6, tmp_path / "library")


def test_the_cache_lies_where_it_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fallback = tmp_path / "run" / "data"
    assert cache_folder(tmp_path / "chosen", fallback) == tmp_path / "chosen"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache_folder(None, fallback) == tmp_path / "cache" / "megatron-snip"
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cache_folder(None, fallback) == fallback

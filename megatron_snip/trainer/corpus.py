"""The built-in text: the Python standard library's own source, as byte tokens, in .bin/.idx files.

It is wherever Python is, so nothing is downloaded. A document is a file: its bytes (0..255) and
then `END_OF_DOCUMENT` (256). Every 20th file is held out whole for validation. Which files are
taken depends on their paths alone; the digest of all that was taken names the folder and is kept in
its manifest, so that numbers from two machines can be told apart when their libraries differ.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron_snip.errors import UsageError
from megatron_snip.files import read_json

END_OF_DOCUMENT = 256
HELD_OUT_EVERY = 20
FORMAT = 1
"""Version of the folder's layout: raise it when tokens or split change."""

TOKEN_BYTES = 2
FILES = ("train.bin", "train.idx", "valid.bin", "valid.idx")
"""What a corpus' folder holds beside its manifest."""

_LEFT_OUT = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "ensurepip",
        "idle_test",
        "idlelib",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
    }
)
"""Folders with installed packages, or with test data rather than prose and code."""


@dataclass(frozen=True)
class Corpus:
    """Where the tokens lie, and what they are.

    Attributes:
        folder: holds train.bin/.idx, valid.bin/.idx and manifest.json.
        digest: SHA-256 (hex) of the names and contents of all documents.
        num_files: documents, training and held out.
        train_tokens: tokens of the training documents.
        valid_tokens: tokens of the held-out documents.
    """

    folder: Path
    digest: str
    num_files: int
    train_tokens: int
    valid_tokens: int

    @property
    def train_prefix(self) -> str:
        """Path of the training data, without .bin or .idx."""
        return str(self.folder / "train")

    @property
    def valid_prefix(self) -> str:
        """Path of the held-out data, without .bin or .idx."""
        return str(self.folder / "valid")


def cache_folder(chosen: Path | None, fallback: Path) -> Path:
    """Return a folder that can be written: `chosen`, the user's cache, or `fallback`.

    Args:
        chosen: taken as it is if given.
        fallback: for users without a home that can be written.
    """
    if chosen is not None:
        return chosen
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(base) / "megatron-snip"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return fallback
    return folder if os.access(folder, os.W_OK | os.X_OK) else fallback


def prepare_corpus(cache: Path, max_bytes: int, library: Path | None = None) -> Corpus:
    """Return the corpus below `cache`, writing it first where it is missing or damaged.

    One process calls this; it takes about a second for 10 MB. The folder appears in one piece.

    Args:
        cache: folder of all corpora.
        max_bytes: most bytes of text, over all files.
        library: folder of Python files; by default the running Python's standard library.

    Raises:
        OSError: if nothing can be read or written.
    """
    root = library or Path(sysconfig.get_paths()["stdlib"])
    documents = list(read_documents(root, max_bytes))
    if len(documents) < 2:
        raise FileNotFoundError(f"no Python files to train on below {root}")
    digest = _digest(documents)
    folder = cache / f"python-source-{digest[:16]}"
    found = _read_manifest(folder, digest)
    return found or _write_corpus(folder, digest, documents)


def read_documents(root: Path, max_bytes: int) -> Iterator[tuple[str, bytes]]:
    """Yield (relative path, contents) of the files that are taken, in path order.

    Where the files hold more than `max_bytes`, those whose path has the smallest hash are taken,
    which is a fair sample and does not depend on the machine.
    """
    relative = sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if not _LEFT_OUT.intersection(path.relative_to(root).parts[:-1]) and path.is_file()
    )
    by_hash = sorted(relative, key=lambda name: hashlib.sha256(name.encode()).digest())
    taken, room = {}, max_bytes
    for name in by_hash:
        contents = (root / name).read_bytes()
        if contents and len(contents) <= room:
            taken[name] = contents
            room -= len(contents)
    yield from sorted(taken.items())


def tokenize(contents: bytes) -> npt.NDArray[np.uint16]:
    """Return a document's tokens: its bytes and the end of document."""
    tokens = np.empty(len(contents) + 1, dtype=np.uint16)
    tokens[:-1] = np.frombuffer(contents, dtype=np.uint8)
    tokens[-1] = END_OF_DOCUMENT
    return tokens


def _digest(documents: list[tuple[str, bytes]]) -> str:
    total = hashlib.sha256(f"{FORMAT} {HELD_OUT_EVERY}".encode())
    for name, contents in documents:
        total.update(name.encode() + b"\0" + hashlib.sha256(contents).digest())
    return total.hexdigest()


def _read_manifest(folder: Path, digest: str) -> Corpus | None:
    """Return the corpus in `folder` if it is whole, else None; others may have written there."""
    try:
        manifest = read_json(folder / "manifest.json", "manifest")
        sizes = {name: _own_size(folder / name) for name in FILES}
    except (OSError, UsageError):
        return None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("corpus"), dict):
        return None
    if manifest.get("digest") != digest or manifest.get("sizes") != sizes:
        return None
    train, valid = (sizes[name] // TOKEN_BYTES for name in ("train.bin", "valid.bin"))
    num_files = manifest["corpus"].get("num_files")
    counts = {"num_files": num_files, "train_tokens": train, "valid_tokens": valid}
    if manifest["corpus"] != counts or type(num_files) is not int:
        return None
    return Corpus(folder, digest, num_files, train, valid)


def _own_size(path: Path) -> int:
    """Return a file's size; -1 for a link or what is no regular file."""
    status = path.lstat()
    return status.st_size if stat.S_ISREG(status.st_mode) else -1


def _write_corpus(folder: Path, digest: str, documents: list[tuple[str, bytes]]) -> Corpus:
    """Write all files into a temporary folder and move it into place."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        held_out = documents[::HELD_OUT_EVERY]
        names = {name for name, _ in held_out}
        train = _write_indexed(draft / "train", [d for d in documents if d[0] not in names])
        valid = _write_indexed(draft / "valid", held_out)
        corpus = Corpus(folder, digest, len(documents), train, valid)
        manifest = {
            "digest": digest,
            "sizes": {path.name: path.stat().st_size for path in sorted(draft.iterdir())},
            "corpus": {k: v for k, v in asdict(corpus).items() if k not in ("folder", "digest")},
            "files": [name for name, _ in documents],
        }
        (draft / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
        draft.chmod(0o755)  # mkdtemp's 0700 would shut other users out of a shared cache
        if folder.exists():  # damaged, or of another digest
            shutil.rmtree(folder)
        try:
            draft.rename(folder)
        except OSError:
            # Another run moved the same corpus there first; then ours is not needed.
            if _read_manifest(folder, digest) is None:
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return corpus


def _write_indexed(prefix: Path, documents: list[tuple[str, bytes]]) -> int:
    """Write documents in Megatron's indexed format; return the number of tokens."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    total = 0
    for _, contents in documents:
        tokens = tokenize(contents)
        builder.add_document(tokens, [len(tokens)])
        total += len(tokens)
    builder.finalize(f"{prefix}.idx")
    return total

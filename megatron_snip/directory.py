"""Output directories: nothing is replaced or removed that SNIP did not write.

    DIR/.megatron-snip          marker: SNIP writes its files in this directory. Its text identifies
                                the run: a checkpoint names the run whose files go on with it

A file counts as written by SNIP if its directory has the marker and its path matches `OWN_FILES`.
"""

import contextlib
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path

from megatron_snip.errors import UsageError
from megatron_snip.files import read_text, write_atomic

MARKER = ".megatron-snip"

OWN_FOLDERS = ("plans", "problems", "divergences", "health", "precision")
"""Folders of a marked directory that hold one file per iteration."""

_RECORD = (
    r"config\.yaml|versions\.json|data\.json|calibration\.json|metrics\.jsonl"
    rf"|({'|'.join(OWN_FOLDERS)})/\d+\.json"
    r"|tensorboard/events\.out\.tfevents\.[^/]*"
)
OWN_FILES = re.compile(rf"{_RECORD}|report\.html|report/[a-z0-9-]+\.(png|svg|html|json)")
"""Paths below a marked directory that SNIP writes."""

_FOLDERS = re.compile(
    rf"{'|'.join(OWN_FOLDERS)}|report|tensorboard|data_index|data(/python-source-[^/]*)?"
    r"|\.?wandb"  # W&B takes `.wandb` where there is one
)
_FILES = re.compile(
    rf"{re.escape(MARKER)}|data_index/[^/]*|data/python-source-[^/]*/[^/]*|{OWN_FILES.pattern}"
)


def own_files(directory: Path) -> Iterator[Path]:
    """Yield the files below `directory` whose paths match `OWN_FILES`; links are not followed.

    SNIP wrote them if the directory has the marker; the caller checks that.
    """
    for name, entry in _entries_below(directory):
        if OWN_FILES.fullmatch(name) and entry.is_file(follow_symlinks=False):
            yield Path(entry)


def run_with(path: Path) -> Path | None:
    """Return the marked directory in which a path is a file of the run; None if it is in none.

    The file need not exist. A report, which is made from a run, is not a file of it.
    """
    path = path.parent.resolve() / path.name  # not the file itself: it need not exist
    for directory in path.parents[:2]:
        name = path.relative_to(directory).as_posix()
        if re.fullmatch(_RECORD, name) and (directory / MARKER).is_file():
            return directory
    return None


def directory_of(path: Path) -> Path:
    """Return the directory whose folder holds a file that the user named; its other files are read.

    Raises:
        UsageError: if it is a run's directory, and holds links (`check_plain`).
    """
    directory = path.absolute().parent.parent
    if (directory / MARKER).is_file():
        check_plain(directory)
    return directory


def check_new_run(directory: Path, overwrite: bool) -> None:
    """Refuse to start a new run where its files would replace others.

    Args:
        directory: need not exist.
        overwrite: whether files of a former run may be replaced.

    Raises:
        UsageError: if the directory is a file, or holds another run and `overwrite` is not set, or
            holds entries with SNIP's names that SNIP did not make: without the marker, or links,
            pipes, and folders in place of files.
    """
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"'{directory}' is no folder; name another directory")
    check_plain(directory)
    present = next(own_files(directory), None)
    if present is None:
        return
    if not (directory / MARKER).is_file():
        raise UsageError(
            f"'{directory}' holds '{present.relative_to(directory)}' but not the marker "
            f"'{MARKER}' of a SNIP run; name another directory (if an earlier megatron-snip wrote "
            f"it, create the marker: touch '{directory / MARKER}')"
        )
    if not overwrite:
        raise UsageError(
            f"'{directory}' holds another run; name another directory, replace its files with "
            "--overwrite, or continue it from the checkpoints of its --save with --load"
        )


def check_plain(directory: Path) -> None:
    """Refuse entries of a run's directory through which SNIP would read or write elsewhere.

    The directory itself may be a link: whoever names it knows where it is.

    Raises:
        UsageError: for a link, a pipe, or a folder in place of a file or the other way round.
    """
    _check_plain(directory, directory)


def _check_plain(directory: Path, root: Path) -> None:
    for entry in _entries(directory):
        path = Path(entry)
        name = path.relative_to(root).as_posix()
        is_folder = _FOLDERS.fullmatch(name) is not None
        kind = "folder" if is_folder else "regular file"
        is_plain = entry.is_dir if is_folder else entry.is_file
        if not is_folder and _FILES.fullmatch(name) is None:
            continue
        if not is_plain(follow_symlinks=False):
            raise UsageError(
                f"'{path}' is no {kind}, and SNIP would read or write there or through it; "
                "remove it, or name another directory"
            )
        if is_folder:
            _check_plain(path, root)


def mark(directory: Path) -> None:
    """Make the directory and put the marker in it, if it has none."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / MARKER).touch()


def mark_new_run(directory: Path) -> None:
    """Make the marker that of a new run: no other run has the same text in it."""
    write_atomic(directory / MARKER, f"{uuid.uuid4().hex}\n")


def run_id(directory: Path) -> str:
    """Return what identifies the run in a directory; "" without a run, or of an unknown one.

    Raises:
        UsageError: if the marker cannot be read.
    """
    marker = directory / MARKER
    return read_text(marker, f"'{marker}'", plain=True).strip() if marker.exists() else ""


def clear_run(directory: Path, files: Iterable[Path], archive: bool) -> Path | None:
    """Take files of a former run out of a marked directory, and folders left empty by that.

    Args:
        directory: the run's.
        files: those to take out.
        archive: True moves them to a new folder `previous-N` below it; False deletes them.

    Returns:
        The new folder; None if there is none.
    """
    assert (directory / MARKER).is_file(), "only a marked directory holds files of SNIP"
    names = (directory / f"previous-{number}" for number in count(1))
    target = next(path for path in names if not os.path.lexists(path))  # a link may lead nowhere
    for path in files:
        if archive:
            moved = target / path.relative_to(directory)
            moved.parent.mkdir(parents=True, exist_ok=True)
            path.rename(moved)
        else:
            path.unlink(missing_ok=True)
        if path.parent != directory:  # a folder of the run's, such as plans/
            with contextlib.suppress(OSError):  # it holds other files
                path.parent.rmdir()
    if not target.exists():
        return None
    # What was moved stays a run's directory, of which a report can be made.
    shutil.copy(directory / MARKER, target)
    return target


def _entries_below(directory: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield the entries of a directory and of its folders, with their paths below it."""
    for entry in _entries(directory):
        yield entry.name, entry
        if entry.is_dir(follow_symlinks=False):
            yield from ((f"{entry.name}/{inner.name}", inner) for inner in _entries(Path(entry)))


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):  # it vanished meanwhile
        return []

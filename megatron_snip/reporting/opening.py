"""Opening a run's directory: whose it is, and what becomes of the files of an earlier run.

A run that resumes in its own directory continues every file; where it went back to a checkpoint,
metrics_file.py says which lines count. Nothing that SNIP did not write is touched (directory.py).
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from megatron_snip.directory import (
    check_new_run,
    clear_run,
    mark,
    mark_new_run,
    own_files,
    run_id,
)
from megatron_snip.directory_lease import take_lease
from megatron_snip.errors import UsageError
from megatron_snip.planning.plan import read_plan
from megatron_snip.reporting.metrics_file import drop_damaged_lines, plans_named
from megatron_snip.reporting.run_directory import RunDirectory

logger = logging.getLogger(__name__)

OldRun = Literal["archive", "delete", "refuse"]
"""What becomes of the files of another run: they move to a folder `previous-N`, they are deleted,
or they are an error."""


def open_run(
    path: Path,
    settings: dict[str, Any],
    continues: bool = False,
    old_run: OldRun = "archive",
) -> RunDirectory:
    """Rank 0: take a run's directory until it is closed. Its files change when the run begins.

    Args:
        path: need not exist.
        settings: the content of config.yaml.
        continues: whether this run continues the one in the directory, whose files then stay.
        old_run: what becomes of the files of another run, when this one begins
            (`RunDirectory.begin`); files that SNIP did not write stay.

    Raises:
        UsageError: if another job writes there, for the reasons of `check_new_run`, or if the run
            itself reads a file that it would delete or move.
        OSError: if the directory cannot be written.
    """
    lease = take_lease(path, continues)
    try:
        check_new_run(path, overwrite=continues or old_run != "refuse")
        # Listed now, because by the time the run begins it may have made files of its own.
        old_files = [] if continues else list(own_files(path))
        _check_inputs(settings.get("snip", {}), old_files)
    except BaseException:
        lease.release()
        raise

    def take_over() -> None:
        mark(path)
        if continues:
            drop_damaged_lines(path / "metrics.jsonl")
        else:
            archive = clear_run(path, old_files, archive=old_run != "delete")
            if archive is not None:
                logger.warning("snip: moved files of an earlier run to '%s'", archive)
        if not continues or not run_id(path):  # an early release marked it without an identity
            mark_new_run(path)
        directory.start(settings)

    directory = RunDirectory(path, lease, take_over)
    return directory


def is_directory_of(path: Path, identity: str, history: Sequence[tuple[int, str]] = ()) -> bool:
    """Return whether a directory is that of the run of a checkpoint.

    Args:
        path: the directory; need not exist.
        identity: what identifies the run in the checkpoint. Checkpoints of megatron-snip 0.2.0 have
            "". Then the directory is the run's if it records each plan of the history.
        history: (iteration, digest) of each plan after the run's first one.

    Raises:
        UsageError: if the directory's marker cannot be read.
    """
    if identity:
        return identity == run_id(path)
    # A plan and its revert can have the same iteration, whose row names the last plan.
    plans = dict(history)
    try:
        numbers = plans_named(path / "metrics.jsonl", max(plans, default=0))
        # A plan without a row has the file `None.json`, which is not there.
        recorded = {
            at: read_plan(path / "plans" / f"{numbers.get(at)}.json").digest for at in plans
        }
    except UsageError:  # a row or a file that is not there
        return False
    return bool(plans) and recorded == plans


def _check_inputs(snip: Mapping[str, Any], old_files: Iterable[Path]) -> None:
    """Refuse settings that name a file among those that are deleted or moved before it is read."""
    settings = ("plan_file", "calibration", "reference")
    inputs = {name: snip[name] for name in settings if snip.get(name)}
    named = {Path(value).resolve(): name for name, value in inputs.items()}
    for file in old_files:
        # A reference may be a run's directory; what counts there is its metrics.jsonl.
        name = named.get(file.resolve()) or named.get(file.resolve().parent)
        if name is not None:
            raise UsageError(
                f"'{inputs[name]}' is a file of an earlier run, which this run deletes or moves; "
                "copy it to another folder first",
                field=name,
            )

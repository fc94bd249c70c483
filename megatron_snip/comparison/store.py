"""Store: the files of a comparison, and which runs have finished.

    OUTPUT/runs/<key>/             a run's directory, as `megatron-snip train` writes it
    OUTPUT/checkpoints/<key>/      a base's checkpoint
    OUTPUT/plans/<key>.json        the plan that a measured contender starts from
    OUTPUT/configs/<key>.yaml      settings of the run, as they were given to it
    OUTPUT/logs/<key>.log          what it printed
    OUTPUT/outcomes/<key>.json     its numbers; written last, so a run that has one has finished
    OUTPUT/comparison.json table.md *.png report/

A lock on OUTPUT/.lock is held by the comparison and inherited by its runs, so that nothing else
writes here while any of them lives, even if the comparison itself was killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron_snip.comparison.measurement import plan_from, read_statistics
from megatron_snip.comparison.outcome import Outcome, outcome_of, read_outcome
from megatron_snip.comparison.run import Run
from megatron_snip.errors import UsageError
from megatron_snip.planning.json_file import write_atomic
from megatron_snip.planning.plan import write_plan
from megatron_snip.trainer.checkpoint_folder import CheckpointFolder
from megatron_snip.trainer.config import TrainConfig, make_train_config
from megatron_snip.trainer.config import linear_shapes

FOLDERS = ("runs", "checkpoints", "plans", "configs", "logs", "outcomes")


@dataclass(frozen=True)
class Store:
    """The directory of a comparison.

    Attributes:
        path: OUTPUT.
    """

    path: Path

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Make the folders and hold the lock; yields its file descriptor.

        Raises:
            UsageError: if the directory cannot be written or another comparison works in it.
        """
        try:
            for name in FOLDERS:
                (self.path / name).mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise UsageError(f"cannot write '{self.path}': {error.strerror or error}") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise UsageError(
                f"another comparison, or a run that one has left, works in '{self.path}'; wait "
                "for it or give another --output"
            ) from None
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def run_dir(self, run: Run) -> Path:
        """Return where a run writes."""
        return self.path / "runs" / run.key

    def log(self, run: Run) -> Path:
        """Return where what it prints goes."""
        return self.path / "logs" / f"{run.key}.log"

    def config_file(self, run: Run) -> Path:
        """Return where its settings lie."""
        return self.path / "configs" / f"{run.key}.yaml"

    def plan_file(self, run: Run) -> Path:
        """Return where the plan lies that it starts from."""
        return self.path / "plans" / f"{run.key}.json"

    def outcome(self, run: Run) -> Outcome | None:
        """Return a run's numbers, or None if it has not finished.

        What files from before do not hold is taken from the run's directory, if that is there.

        Raises:
            UsageError: if the file is damaged.
        """
        path = self.path / "outcomes" / f"{run.key}.json"
        if not path.is_file():
            return None
        outcome, config = read_outcome(path), self.config_of(run)
        if run.kind == "branch" and not outcome.options:
            # A directory that is gone or damaged leaves them unknown, which tables and report say.
            with contextlib.suppress(UsageError, KeyError, TypeError, ValueError):
                kept = outcome_of(run, self.run_dir(run), config).options
                return dataclasses.replace(outcome, options=kept)
        if outcome.options and set(outcome.options) != {s.name for s in linear_shapes(config)}:
            raise UsageError(
                f"'{path}' is not an outcome of '{run.name}': other linears; remove it"
            )
        return outcome

    def finished(self, run: Run) -> bool:
        """Whether a run need not be made again, with what other runs need of it."""
        if not (self.path / "outcomes" / f"{run.key}.json").is_file():
            return False
        if run.kind == "base":
            folder = CheckpointFolder(self._checkpoints(run)).of_step(run.last_step)
            return (folder / "metadata.json").is_file()
        return run.kind != "measure" or self._statistics(run).is_file()

    def prepare(self, run: Run) -> TrainConfig:
        """Write what a run needs: its settings and its plan; return the settings.

        Raises:
            SnipError: if its plan cannot be made.
        """
        config = self.config_of(run)
        if run.measurement is not None:
            statistics = read_statistics(self._statistics(run.measurement))
            write_plan(plan_from(statistics, config.snip), self.plan_file(run))
        text = json.dumps(config.model_dump(mode="json"), indent=1)
        write_atomic(self.config_file(run), text + "\n")  # JSON is YAML
        return config

    def finish(self, run: Run) -> Outcome:
        """Read a run that has ended and keep its numbers.

        Raises:
            UsageError: if it has not made all its steps.
        """
        outcome = outcome_of(run, self.run_dir(run), self.config_of(run))
        path = self.path / "outcomes" / f"{run.key}.json"
        write_atomic(path, json.dumps(outcome.to_json()) + "\n")
        return outcome

    def config_of(self, run: Run) -> TrainConfig:
        """Return a run's settings with its paths."""
        values = {**run.values, "run_dir": self.run_dir(run), "overwrite": True}
        if run.kind == "base":
            values["save"] = values["load"] = self._checkpoints(run)
        if run.base is not None:
            folder = self._checkpoints(run.base)
            values |= {"load": folder, "ckpt_step": run.base.last_step}
        if run.measurement is not None:
            values["snip"] = {**values["snip"], "plan_file": self.plan_file(run)}
        return make_train_config(values)

    def _checkpoints(self, run: Run) -> Path:
        return self.path / "checkpoints" / run.key

    def _statistics(self, run: Run) -> Path:
        return self.run_dir(run) / "divergences" / f"{run.first_step}.json"

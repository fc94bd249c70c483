"""What a comparison keeps, and how it knows that a run has finished."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_snip.comparison.run import Run
from megatron_snip.comparison.schedule import make_schedule
from megatron_snip.comparison.store import Store
from megatron_snip.errors import UsageError
from megatron_snip.reporting.run_directory import RunDirectory
from tests.unit.comparison.build import comparison

RUNS = {run.name: run for run in make_schedule(comparison(seeds=1)).runs}
BF16 = RUNS["forks-bf16-s0"]


def make(store: Store, run: Run, steps: int) -> None:
    """Write what the trainer would have, up to some step."""
    directory = RunDirectory(store.run_dir(run))
    directory.start(store.config_of(run).model_dump(mode="json"))
    for step in range(run.first_step, steps):
        values = {"step": step, "loss": 3.0 - step / 10, "lowest_precision_fraction": 0.0}
        if step == run.last_step - 1:
            values["validation_loss"] = 2.5
        directory.metrics({**values, "wall_s": 0.5})
    directory.close()


def test_a_run_has_finished_once_its_numbers_are_kept(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.locked():
        make(store, BF16, BF16.last_step)
        assert not store.finished(BF16)
        outcome = store.finish(BF16)
        assert store.finished(BF16)
    assert store.outcome(BF16) == outcome
    assert outcome.steps == (6, 7, 8, 9)
    assert outcome.losses == pytest.approx((2.4, 2.3, 2.2, 2.1))
    assert outcome.validation_loss == 2.5
    assert outcome.shares == pytest.approx({"bf16": 1.0})
    assert outcome.seconds == 2.0


def test_a_run_that_was_cut_short_has_not_finished(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.locked():
        make(store, BF16, BF16.last_step - 1)
        with pytest.raises(UsageError, match="ends after step 9, not 10"):
            store.finish(BF16)
    assert not store.finished(BF16)


def test_a_base_without_its_checkpoint_is_made_again(tmp_path: Path) -> None:
    store, base = Store(tmp_path), RUNS["forks-base"]
    with store.locked():
        make(store, base, base.last_step)
        store.finish(base)
    assert not store.finished(base)
    folder = store.path / "checkpoints" / base.key / "iter_0000006"
    folder.mkdir(parents=True)
    (folder / "metadata.json").write_text("{}")
    assert store.finished(base)


def test_a_damaged_outcome_is_named(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.locked():
        path = store.path / "outcomes" / f"{BF16.key}.json"
        path.write_text('{"version": 1, "key": "x"}')
        with pytest.raises(UsageError, match="is not an outcome"):
            store.outcome(BF16)
        path.write_text('{"version": 7}')
        with pytest.raises(UsageError, match="version 1; remove it"):
            store.outcome(BF16)


def test_two_comparisons_do_not_work_in_one_directory(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.locked(), pytest.raises(UsageError, match="another comparison"), store.locked():
        pass
    with store.locked():
        pass


def test_runs_read_the_bases_checkpoint_and_their_own_plan(tmp_path: Path) -> None:
    store = Store(tmp_path)
    fork, base = RUNS["forks-fp3-75-snip-gemm-s0"], RUNS["forks-base"]
    config = store.config_of(fork)
    assert config.load == store.config_of(base).save
    assert config.ckpt_step == 6
    assert config.save is None
    assert config.snip.plan_file == store.plan_file(fork)
    assert store.config_of(BF16).snip.plan_file is None

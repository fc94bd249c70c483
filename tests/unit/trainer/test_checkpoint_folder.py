"""A folder of checkpoints never passes a half-written one for whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from megatron_snip.errors import UsageError
from megatron_snip.trainer.checkpoint_folder import (
    POINTER,
    SETTINGS,
    CheckpointFolder,
    SavedRun,
    check_loadable,
    layout_changes,
    order_changes,
)
from megatron_snip.trainer.config import TrainConfig

RUN = SavedRun(TrainConfig().model_dump(mode="json"), 2)


def write(folder: CheckpointFolder, step: int, content: str = "tensors") -> Path:
    partial = folder.begin(step)
    (partial / "metadata.json").write_text("{}")
    (partial / "tensors").write_text(content)
    return folder.finish(step, RUN)


def test_the_pointer_names_the_last_whole_checkpoint(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "new" / "place")
    assert folder.latest() is None
    for step in (20, 40):
        assert write(folder, step).name == f"iter_00000{step}"
        assert folder.latest() == step
    assert folder.saved_run(20) == RUN


@pytest.mark.parametrize("moment", ["begin", "tensors", "settings", "rename"])
def test_a_run_killed_while_saving_leaves_the_checkpoint_before(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = CheckpointFolder(tmp_path)
    write(folder, 20)
    partial = folder.begin(40)
    if moment != "begin":
        (partial / "metadata.json").write_text("{}")
        (partial / "tensors").write_text("tens")
    if moment in ("settings", "rename"):
        renaming = os.rename

        def rename(source: Any, target: Any) -> None:
            if moment == "rename":
                renaming(source, target)
            raise KeyboardInterrupt

        monkeypatch.setattr(os, "rename", rename)
        with pytest.raises(KeyboardInterrupt):
            folder.finish(40, RUN)
        monkeypatch.undo()
    assert folder.latest() == 20
    # The next checkpoint clears what was left, and the same step can be written again.
    for content in ("anew", "once more"):
        assert (write(folder, 40, content) / "tensors").read_text() == content
    assert folder.latest() == 40
    assert not list(tmp_path.glob(".iter*"))


@pytest.mark.parametrize(
    ("pointer", "remove", "message"),
    [
        ("forty", None, "must hold a number of steps, got 'forty'"),
        ("60", None, "no 'metadata.json' in it"),
        ("40", "metadata.json", "no 'metadata.json' in it"),
        ("40", SETTINGS, f"no '{SETTINGS}' in it"),
    ],
)
def test_a_pointer_to_nothing_whole_is_refused(
    tmp_path: Path, pointer: str, remove: str | None, message: str
) -> None:
    folder = CheckpointFolder(tmp_path)
    write(folder, 40)
    (tmp_path / POINTER).write_text(pointer)
    if remove:
        (folder.of_step(40) / remove).unlink()
    with pytest.raises(UsageError, match=message):
        folder.latest()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "version None; this megatron-snip reads version 1"),
        ('{"version": 2}', "version 2;"),
        ('{"version": 1, "config": {}}', "KeyError: 'world_size'"),
    ],
)
def test_damaged_settings_are_refused(tmp_path: Path, text: str, message: str) -> None:
    folder = CheckpointFolder(tmp_path)
    write(folder, 40)
    (folder.of_step(40) / SETTINGS).write_text(text)
    with pytest.raises(UsageError, match=message):
        folder.saved_run(40)


def settings(**values: Any) -> dict[str, Any]:
    return TrainConfig(**values).model_dump(mode="json")


def test_another_model_cannot_be_loaded() -> None:
    with pytest.raises(UsageError, match=r"'place' is of another model: hidden_size 256 -> 512"):
        check_loadable(RUN, settings(hidden_size=512), Path("place"))
    check_loadable(RUN, settings(lr=1e-2, train_iters=9000), Path("place"))


def test_a_sharded_optimizer_goes_to_another_layout_only_if_written_for_it() -> None:
    there = settings(use_distributed_optimizer=True, tensor_model_parallel_size=2)
    sharded = SavedRun(settings(use_distributed_optimizer=True), 2)
    with pytest.raises(UsageError, match=r"tensor_model_parallel_size 1 -> 2.*fully_reshardable"):
        check_loadable(sharded, there, Path("place"))
    fully = {"use_distributed_optimizer": True, "dist_ckpt_optim_fully_reshardable": True}
    check_loadable(SavedRun(settings(**fully), 2), there, Path("place"))
    check_loadable(RUN, settings(tensor_model_parallel_size=2), Path("place"))


def test_experts_on_every_rank_are_not_turned_into_experts_dealt_out() -> None:
    ep = "expert_model_parallel_size"
    dealt = {**RUN.config, ep: 2}
    with pytest.raises(UsageError, match=rf"'x' has {ep} 1, not 2: Megatron cannot convert"):
        check_loadable(RUN, dealt, Path("x"))
    with pytest.raises(UsageError, match=rf"{ep} 2, not 1"):
        check_loadable(SavedRun(dealt, 2), RUN.config, Path("x"))
    check_loadable(SavedRun(dealt, 2), {**dealt, ep: 4}, Path("x"))


def test_changes_are_told_by_name() -> None:
    changed = settings(seed=7, pipeline_model_parallel_size=2)
    assert order_changes(RUN.config, changed) == ("seed 1234 -> 7",)
    assert layout_changes(RUN.config, changed) == ("pipeline_model_parallel_size 1 -> 2",)

"""Bad input ends in one line before anything is written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from megatron_snip.directory import OWN_FOLDERS, mark
from megatron_snip.errors import UsageError
from megatron_snip.trainer.checkpoint import (
    POINTER,
    SETTINGS,
    checkpoint_path,
    finish_checkpoint,
    latest_iteration,
    make_partial,
    resume_iteration,
)
from megatron_snip.trainer.config import TrainConfig
from megatron_snip.trainer.session import check_run, drop_later_iterations, run_directories


def check(path: Path, **values: Any) -> None:
    config = TrainConfig(run_dir=path, **values)
    check_run(config, config.model_parallel_size)


@pytest.mark.parametrize(
    "words",
    [
        ["--hidden-size", "250"],
        ["--tensor-model-parallel-size", "2", "--nproc-per-node", "1"],
        ["--nproc-per-node", "none"],
        ["--config", "nowhere.yaml"],
    ],
)
def test_bad_input_is_refused(words: list[str], tmp_path: Path, refused: Any) -> None:
    refused("train", "--run-dir", tmp_path / "run", *words)
    assert not (tmp_path / "run").exists()


def write_checkpoint(folder: Path, iteration: int, content: str = "", **values: Any) -> Path:
    """Write a checkpoint without tensors."""
    path = checkpoint_path(folder, iteration)
    partial = path.with_name(f".{path.name}.partial")
    partial.mkdir(parents=True)
    (partial / "metadata.json").write_text("{}")
    (partial / "tensors").write_text(content)
    config = TrainConfig(**values).model_dump(mode="json")
    settings = {"version": 2, "config": config, "world_size": 1, "files": {}}
    finish_checkpoint(path, partial, json.dumps(settings))
    return folder


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"recompute_granularity": "full"}, "Megatron refuses .*recompute_method must be"),
        ({"expert_model_parallel_size": 2}, "Megatron refuses .*num_moe_experts must be"),
        ({"num_experts": 4, "moe_router_topk": 1}, "Megatron refuses .*moe-router-pre-softmax"),
        ({"save_interval": 5}, "save_interval needs save"),
        ({"ckpt_step": 5}, "ckpt_step needs load"),
        ({"load": "none"}, "load '.*none' holds no checkpoint"),
        ({"load": "dense", "ckpt_step": 30}, "iter_0000030' is not a complete checkpoint"),
        ({"load": "dense", "hidden_size": 512}, "of another model: hidden_size 256 -> 512"),
        ({"save": "dense"}, "of another run, up to iteration 20; resume .*--load"),
        ({"load": "ep2", "num_experts": 4}, "Megatron cannot convert"),
        (
            {"load": "ep1", "num_experts": 4, "expert_model_parallel_size": 2},
            "Megatron cannot convert",
        ),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    write_checkpoint(tmp_path / "dense", 20)
    for ep in (1, 2):
        write_checkpoint(tmp_path / f"ep{ep}", 20, num_experts=4, expert_model_parallel_size=ep)
    placed = {k: tmp_path / v if k in ("save", "load") else v for k, v in values.items()}
    with pytest.raises(UsageError, match=message) as caught:
        check(tmp_path / "run", **placed)
    assert "\n" not in str(caught.value)


def test_checkpoints_without_a_pointer_are_not_replaced(tmp_path: Path) -> None:
    save = write_checkpoint(tmp_path / "save", 20)
    (save / POINTER).write_text("40")  # a checkpoint that was deleted
    check(tmp_path / "run", save=save, load=save, ckpt_step=20)
    (save / POINTER).unlink()
    check(tmp_path / "run", save=save, load=save, ckpt_step=20)
    for load in (None, save):
        with pytest.raises(UsageError, match=r"holds 'iter_0000020' but no .*--ckpt-step N"):
            check(tmp_path / "run", save=save, load=load)


def test_only_partial_checkpoints_are_removed(tmp_path: Path) -> None:
    for name in (".iter_0000009.partial", ".iter_0000009.replaced.partial", ".iter_mine.partial"):
        (tmp_path / name).mkdir()
    make_partial(tmp_path / ".iter_0000010.partial")
    assert {p.name for p in tmp_path.iterdir()} == {".iter_mine.partial", ".iter_0000010.partial"}


def test_the_files_of_another_run_than_the_checkpoints_are_moved_aside(tmp_path: Path) -> None:
    load = write_checkpoint(tmp_path / "save", 5, run_dir=tmp_path / "one")
    for name in ("one", "two"):
        mark(tmp_path / name)
        (tmp_path / name / "metrics.jsonl").write_text('{"iteration": 5}\n{"iteration": 9}\n')
        with run_directories(TrainConfig(run_dir=tmp_path / name, load=load), 5, None):
            pass
    assert (tmp_path / "one" / "metrics.jsonl").read_text() == '{"iteration": 5}\n'
    archived = tmp_path / "two" / "previous-1" / "metrics.jsonl"
    assert archived.read_text() == '{"iteration": 5}\n{"iteration": 9}\n'
    assert not (tmp_path / "two" / "metrics.jsonl").exists()


def test_a_run_resumes_from_the_latest_checkpoint(tmp_path: Path) -> None:
    there = write_checkpoint(tmp_path / "there", 20)
    assert resume_iteration(TrainConfig()) == 0
    same = tmp_path / "not yet"
    assert resume_iteration(TrainConfig(load=same, save=same)) == 0
    assert resume_iteration(TrainConfig(load=there)) == 20
    write_checkpoint(there, 40)
    assert resume_iteration(TrainConfig(load=there)) == 40
    assert resume_iteration(TrainConfig(load=there, ckpt_step=20)) == 20


@pytest.mark.parametrize("renames", [0, 1])
def test_a_crash_while_finishing_leaves_the_previous_checkpoint(
    tmp_path: Path, renames: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, 20)
    rename = os.rename

    def crash(source: Any, target: Any) -> None:
        if renames:
            rename(source, target)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", crash)
        with pytest.raises(KeyboardInterrupt):
            write_checkpoint(tmp_path, 40)
    assert latest_iteration(tmp_path) == 20
    for partial in tmp_path.glob(".iter*"):
        partial.rename(tmp_path / "away")
    for content in ("first", "second"):  # an iteration can be written again
        write_checkpoint(tmp_path, 40, content)
        assert (checkpoint_path(tmp_path, 40) / "tensors").read_text() == content
    assert latest_iteration(tmp_path) == 40 and not list(tmp_path.glob(".iter*"))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (POINTER, "forty", "must hold a number of iterations, got 'forty'"),
        (POINTER, "60", "is not a complete checkpoint"),
        ("iter_0000040/metadata.json", None, "no 'metadata.json'"),
        (f"iter_0000040/{SETTINGS}", None, f"no '{SETTINGS}'"),
        (f"iter_0000040/{SETTINGS}", "{", "is not valid JSON"),
        (f"iter_0000040/{SETTINGS}", "[]", "must hold a JSON object, got list"),
        (f"iter_0000040/{SETTINGS}", '{"version": 2, "config": {}}', "world_size: Field required"),
    ],
)
def test_damaged_checkpoints_are_refused(
    tmp_path: Path, name: str, text: str | None, message: str
) -> None:
    write_checkpoint(tmp_path, 40)
    if text is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=message):
        latest_iteration(tmp_path)


def test_a_resumed_run_drops_rows_and_files_of_later_iterations(tmp_path: Path) -> None:
    drop_later_iterations(tmp_path / "absent", 5)
    for folder in OWN_FOLDERS:
        (tmp_path / folder).mkdir()
        for name in ("3", "5", "6", "\u00b25"):
            (tmp_path / folder / f"{name}.json").write_text("{}")
    good = [json.dumps({"iteration": i, "text": "\u2028 is not an end of line"}) for i in (1, 5)]
    damaged = ['{"iteration": 1e999}', "[" * 10**5, "[1]", '{"iteration": 0}', '{"iteration": 6}']
    data = "\n".join([*good, *damaged]).encode() + b'\n{"iteration": 1, "x": "\xff\xfe'
    (tmp_path / "metrics.jsonl").write_bytes(data)
    drop_later_iterations(tmp_path, 5)
    text = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8")
    assert text == "".join(f"{line}\n" for line in good)
    for folder in OWN_FOLDERS:
        assert sorted(p.stem for p in (tmp_path / folder).iterdir()) == ["3", "5", "\u00b25"]

"""Settings from YAML and flags; bad input ends in one line before anything is written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from ctypes.util import find_library
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from megatron_snip.cli import train
from megatron_snip.cli.commands import build_parser
from megatron_snip.cli.train import ignored_flags, read_settings
from megatron_snip.collectives import Control
from megatron_snip.directory import OWN_FOLDERS, mark, mark_new_run, run_id
from megatron_snip.errors import UnsupportedError, UsageError
from megatron_snip.reporting.events import Event, Metrics
from megatron_snip.reporting.run_directory import RunDirectory, drop_later_iterations
from megatron_snip.run.state import RunState
from megatron_snip.trainer import session
from megatron_snip.trainer.checkpoint import (
    POINTER,
    SETTINGS,
    Progress,
    checkpoint_path,
    finish_checkpoint,
    latest_iteration,
    make_partial,
    resume_iteration,
)
from megatron_snip.trainer.config import TrainConfig, make_train_config
from megatron_snip.trainer.launch import default_num_ranks, is_rank, launch, settings_of_ranks
from megatron_snip.trainer.session import check_run, make_hook, make_writers, run_directories
from tests.unit.planning.build import plan_of

accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def load(*words: str) -> TrainConfig:
    return read_settings(build_parser("train").parse_args(["train", *words]))


def test_flags_win_over_the_file_field_by_field(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("num_layers: 8\nlr: 0.001\nsnip: {interval: 50, efficiency_target: 0.5}\n")
    flags = ("--lr", "2e-3", "--snip-interval", "7", "--no-bf16", "--snip")
    config = load("--config", str(file), *flags)
    assert (config.num_layers, config.lr, config.bf16) == (8, 2e-3, False)
    assert (config.snip.interval, config.snip.efficiency_target) == (7, 0.5)
    assert config.snip.enabled


def test_settings_of_snip_without_snip_are_named(tmp_path: Path) -> None:
    def ignored(*words: str) -> list[str]:
        args = build_parser("train").parse_args(["train", *words])
        return ignored_flags(args, read_settings(args))

    file = tmp_path / "snip.yaml"
    file.write_text("interval: 50")
    target = ("--snip-efficiency-target", "0.5")
    both = ["--snip-efficiency-target", "--snip-formats"]
    assert ignored(*target, "--snip-formats", "fp8") == both
    assert ignored("--snip-config", str(file)) == ["--snip-interval"]
    assert ignored(*target, "--snip") == ignored(*target, "--no-snip") == ignored() == []
    file.write_text("{interval: 50, enabled: false}")
    assert ignored("--snip-config", str(file)) == []
    assert ignored("--snip-config", str(file), *target) == ["--snip-efficiency-target"]


def test_defaults_that_follow_other_fields() -> None:
    config = TrainConfig(hidden_size=384, num_attention_heads=6)
    assert config.ffn_width == 1024
    assert config.query_groups == 6
    assert config.padded_vocab_size == 384
    assert TrainConfig(make_vocab_size_divisible_by=1).padded_vocab_size == 257


def check(*words: object, ranks: int | None = None) -> None:
    config = load("--run-dir", "run", *map(str, words))
    check_run(config, config.model_parallel_size if ranks is None else ranks)


def write_checkpoint(
    folder: Path, iteration: int, content: str = "", run_id: str = "", **values: Any
) -> Path:
    """Write a checkpoint without tensors."""
    path = checkpoint_path(folder, iteration)
    partial = path.with_name(f".{path.name}.partial")
    partial.mkdir(parents=True)
    (partial / "metadata.json").write_text("{}")
    (partial / "tensors").write_text(content)
    config = TrainConfig(**values).model_dump(mode="json")
    settings = {"version": 2, "config": config, "world_size": 1, "files": {}, "run_id": run_id}
    finish_checkpoint(path, partial, json.dumps(settings))
    return folder


def write_run_json(name: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Write a checkpoint whose settings are changed."""
    file = write_checkpoint(Path(name), 20) / "iter_0000020" / "run.json"
    settings = json.loads(file.read_text())
    change(settings)
    file.write_text(json.dumps(settings))


def contents() -> dict[Path, bytes]:
    """The bytes of every file of this folder, and nothing for a folder in it."""
    return {path: path.read_bytes() if path.is_file() else b"" for path in Path().rglob("*")}


VIRTUAL = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage"
BAD_RANKS = [
    ("--tensor-model-parallel-size 2", 3, "a multiple of 2 ranks, got 3"),
    ("--num-experts 4 --expert-model-parallel-size 2", 1, "size 1 need a multiple of 2"),
    ("--global-batch-size 6", 4, r"global_batch_size \(6\) .* data-parallel ranks \(4\)"),
    (f"{VIRTUAL} 1 --global-batch-size 3", 2, r"iteration of an interleaved pipeline \(3\)"),
]
BAD = [
    ("--hidden-size 252", r"hidden_size \(252\) .* 2 x num_attention_heads \(8\)"),
    ("--num-query-groups 3", r"num_attention_heads \(4\) .* num_query_groups \(3\)"),
    ("--ffn-hidden-size 129 --tensor-model-parallel-size 2", r"ffn_hidden_size \(129\) .* \(2\)"),
    ("--pipeline-model-parallel-size 3", r"num_layers \(4\) .* \(3\)"),
    ("--num-layers-per-virtual-pipeline-stage 1", "pipeline_model_parallel_size is 1"),
    (f"{VIRTUAL} 4", r"layers per pipeline stage \(2\)"),
    (
        "--sequence-parallel --tensor-model-parallel-size 2 --seq-length 63",
        r"seq_length under sequence_parallel \(63\)",
    ),
    ("--overlap-param-gather", "needs use_distributed_optimizer"),
    ("--min-lr 1", "min_lr 1 must not be larger than lr 0.003"),
    ("--lr-warmup-iters 150", "must be less than train_iters 150"),
    ("--snip-output-dir x", r"snip\.output_dir is for Megatron's scripts"),
    ("--num-experts 4 --moe-router-topk 5", "moe_router_topk 5 is more than num_experts 4"),
    ("--num-experts 4 --moe-router-topk 1", "moe_router_topk 1 gives the router no gradient"),
    ("--num-experts 4 --tensor-model-parallel-size 2", "parallel_size 2 needs sequence_parallel"),
    ("--num-experts 4 --expert-model-parallel-size 3", r"num_experts \(4\) .*size \(3\)"),
    (
        "--num-experts 4 --moe-ffn-hidden-size 65 --expert-tensor-parallel-size 2",
        r"moe_ffn_hidden_size \(65\) .* expert_tensor_parallel_size \(2\)",
    ),
    ("--recompute-granularity full", "Megatron refuses .*recompute_method must be"),
    ("--expert-model-parallel-size 2", "Megatron refuses .*num_moe_experts must be"),
    ("--save-interval 5", "save_interval needs save"),
    ("--ckpt-step 5", "ckpt_step needs load"),
    ("--load none", "load 'none' holds no checkpoint"),
    ("--load dense --ckpt-step 30", "no checkpoint of iteration 30 in 'dense'"),
    ("--load dense --hidden-size 512", "of another model: hidden_size 256 -> 512"),
    ("--save dense", "of another run, up to iteration 20; resume .*--load"),
    ("--load ep2 --num-experts 4", "Megatron cannot convert"),
    ("--load ep1 --num-experts 4 --expert-model-parallel-size 2", "Megatron cannot convert"),
    ("--config key.yaml", "unknown key 'hiden_size'"),
    ("--config nested.yaml", "unknown key 'snip.interval_s'"),
    ("--config scalar.yaml", "'snip' must hold a mapping"),
    ("--lr fast", "lr: .* got 'fast'"),
    ("--snip-efficiency-target 1.5", "efficiency_target: .* less than or equal to 1"),
    # Numbers outside of sense, with their limits.
    ("--train-iters 100000000000000000000", "train_iters: .* less than or equal to 100000000,"),
    ("--train-iters 100000000", r"train_iters 100000000 x .* at most 100000000 samples"),
    ("--eval-iters 1000000000", "eval_iters: .* less than or equal to 1000000,"),
    ("--seq-length 1000000000", "seq_length: .* less than or equal to 1000000,"),
    ("--hidden-size 1000000000", "hidden_size: .* less than or equal to 1000000,"),
    ("--make-vocab-size-divisible-by 1000000000000", "less than or equal to 1000000,"),
    ("--lr 1e300", "lr: .* less than or equal to 1000,"),
    ("--snip-weight-lambda 1e300", "weight_lambda: .* less than or equal to 1000000"),
    ("--snip-pins *=fp3", r"pins: '\*=fp3': fp3 is neither bf16 nor an option of formats fp8,fp4"),
    ("--run-dir ~nobody-here/x", "run_dir: .*home"),
    ("--run-dir foreign", "foreign' holds 'metrics.jsonl' but not the marker"),
    ("--run-dir foreign --overwrite", "not the marker"),
    ("--run-dir foreign --load foreign/typo", "typo' holds no checkpoint"),
    # What a checkpoint says of itself.
    ("--load text", "expert_model_parallel_size: must be an integer, got 'two'"),
    ("--load device", r"files\./dev/zero"),
]


@pytest.mark.parametrize(
    ("words", "ranks", "message"),
    [*BAD_RANKS, *((words, None, message) for words, message in BAD)],
)
def test_what_cannot_run_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, ranks: int | None, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_checkpoint(Path("dense"), 20)
    for ep in (1, 2):
        write_checkpoint(Path(f"ep{ep}"), 20, num_experts=4, expert_model_parallel_size=ep)
    write_run_json("text", lambda run: run["config"].update(expert_model_parallel_size="two"))
    write_run_json("device", lambda run: run.update(files={"/dev/zero": "0"}))
    texts = {"key": "hiden_size: 3", "nested": "snip: {interval_s: 3}", "scalar": "snip: 3"}
    for name, text in texts.items():
        Path(f"{name}.yaml").write_text(text)
    Path("foreign").mkdir()
    Path("foreign/metrics.jsonl").write_text("mine")
    before = contents()
    with pytest.raises(UsageError, match=message) as caught:
        check(*words.split(), ranks=ranks)
    assert "\n" not in str(caught.value)
    assert contents() == before


def test_checkpoints_without_a_pointer_are_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save = write_checkpoint(tmp_path / "save", 20)
    (save / POINTER).write_text("40")  # a checkpoint that was deleted
    resume = ("--save", save, "--load", save)
    check(*resume, "--ckpt-step", 20)
    (save / POINTER).unlink()
    check(*resume, "--ckpt-step", 20)
    for words in (resume[:2], resume):
        with pytest.raises(UsageError, match=r"holds 'iter_0000020' but no .*--ckpt-step N"):
            check(*words)


def test_only_partial_checkpoints_are_removed(tmp_path: Path) -> None:
    for name in (".iter_0000009.partial", ".iter_0000009.replaced.partial", ".iter_mine.partial"):
        (tmp_path / name).mkdir()
    make_partial(tmp_path / ".iter_0000010.partial")
    assert {p.name for p in tmp_path.iterdir()} == {".iter_mine.partial", ".iter_0000010.partial"}


def test_the_files_of_another_run_than_the_checkpoints_are_moved_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where they are at the same path: of another project, or of a run that replaced it."""
    names = ("one/runs/demo", "two/runs/demo", "three/runs/demo")
    for name in names:
        mark(tmp_path / name)
        if name != names[2]:  # that of a checkpoint and marker without an identity
            mark_new_run(tmp_path / name)
        (tmp_path / name / "metrics.jsonl").write_text('{"iteration": 5}\n{"iteration": 9}\n')
    same = run_id(tmp_path / names[0])
    for name, identity in zip(names, (same, same, ""), strict=True):
        load = write_checkpoint(tmp_path / name / "save", 5, run_id=identity, run_dir="runs/demo")
        monkeypatch.chdir(tmp_path / name / ".." / "..")
        config = TrainConfig(run_dir=Path("runs/demo"), load=load, overwrite=name == names[2])
        with run_directories(config, 5, Control()) as directory:
            assert directory is not None
            assert len(read_lines(tmp_path / name / "metrics.jsonl")) == 2  # nothing is refused yet
            directory.begin()
    assert read_lines(tmp_path / names[0] / "metrics.jsonl") == ['{"iteration": 5}']
    for name in names[1:]:
        assert len(read_lines(tmp_path / name / "previous-1" / "metrics.jsonl")) == 2
        assert not (tmp_path / name / "metrics.jsonl").exists()


def read_lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_a_run_resumes_from_the_latest_checkpoint(tmp_path: Path) -> None:
    there = write_checkpoint(tmp_path / "there", 20)
    assert resume_iteration(TrainConfig()) == 0
    same = tmp_path / "not yet"
    assert resume_iteration(TrainConfig(load=same, save=same)) == 0
    assert resume_iteration(TrainConfig(load=there)) == 20
    write_checkpoint(there, 40)
    assert resume_iteration(TrainConfig(load=there)) == 40
    assert resume_iteration(TrainConfig(load=there, ckpt_step=20)) == 20
    with pytest.raises(UsageError, match=r"no checkpoint of iteration 30 in .*; there are 20, 40$"):
        resume_iteration(TrainConfig(load=there, ckpt_step=30))
    with pytest.raises(UsageError, match=r"it holds no checkpoint$"):
        resume_iteration(TrainConfig(load=same, ckpt_step=20))


@pytest.mark.parametrize("is_on", [True, False])
def test_a_resume_that_turns_snip_on_or_off_says_so(
    is_on: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "SnipController", Mock())
    config = TrainConfig.model_validate({"snip": {"enabled": is_on}})
    plan = plan_of({"decoder.layers.0.mlp.linear_fc1": "fp4"})
    former = None if is_on else RunState(7, plan)
    make_hook(Mock(config=config), [], Progress(7, None, None, former))
    (line,) = caplog.messages
    expected = {
        True: "snip: the checkpoint of iteration 7 has no SNIP state; starting from the initial",
        False: f"snip: {plan.label}, which is in the checkpoint, is not used",
    }
    assert line.startswith(expected[is_on])
    caplog.clear()
    make_hook(Mock(config=config), [], None)
    make_hook(Mock(config=config), [], Progress(8, None, None, None if former else Mock()))
    assert not caplog.messages


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


def test_a_path_may_begin_with_the_home_that_quotes_hide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    assert make_train_config({"run_dir": "~/x"}).run_dir == Path("/somewhere/x")


RANK = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "x"),
        ("RANK", "2"),
        ("WORLD_SIZE", "0"),
        ("LOCAL_WORLD_SIZE", "0"),
        ("MASTER_PORT", "0"),
        ("MASTER_PORT", ""),
        ("MASTER_ADDR", ""),
    ],
)
def test_variables_that_a_launcher_left_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    for each, text in RANK.items():
        monkeypatch.setenv(each, text)
    assert is_rank()
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=f"{name} .*env -u RANK -u WORLD_SIZE"):
        is_rank()
    monkeypatch.delenv("RANK")
    assert not is_rank()


@pytest.mark.parametrize("kind", [UsageError, UnsupportedError])
def test_what_every_rank_refuses_is_printed_by_rank_0(
    monkeypatch: pytest.MonkeyPatch, kind: type[UsageError | UnsupportedError]
) -> None:
    monkeypatch.setattr(train, "train_as_rank", Mock(side_effect=kind("cannot run")))
    for each, text in RANK.items():
        monkeypatch.setenv(each, text)
    args = build_parser("train").parse_args(["train"])
    with pytest.raises(kind, match="cannot run"):
        train.run(args)
    monkeypatch.setenv("RANK", "1")
    assert train.run(args) == 2


WITHOUT_RANKS = """
import subprocess, sys
from megatron_snip.trainer.config import TrainConfig
from megatron_snip.trainer.launch import default_num_ranks, launch
subprocess.Popen = lambda *words, **options: sys.exit("torch" in sys.modules)
launch(TrainConfig(), default_num_ranks(TrainConfig()))
"""


@pytest.mark.skipif(find_library("cuda") is not None, reason="torch counts the GPUs first")
def test_ranks_start_before_the_launcher_imports_torch() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_RANKS], check=True)


def test_there_is_a_rank_for_each_gpu_that_replicas_fit_on(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig(tensor_model_parallel_size=2)
    monkeypatch.setattr("ctypes.CDLL", lambda name: None)
    for gpus, ranks in ((0, 2), (2, 2), (5, 4)):
        monkeypatch.setattr("torch.cuda.device_count", lambda gpus=gpus: gpus)
        assert default_num_ranks(config) == ranks
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(UsageError, match=r"need 2 GPUs, and this machine has 1; .* the CPU"):
        default_num_ranks(config)


def test_thousands_of_ranks_are_not_started() -> None:
    with pytest.raises(UsageError, match="100000 ranks on one machine; at most 1024"):
        launch(TrainConfig(), 100_000)


def test_ranks_know_which_settings_were_given() -> None:
    config = make_train_config({"num_layers": 2, "snip": {"formats": "bf16,fp8-bf16-bf16"}})
    of_rank = make_train_config(json.loads(settings_of_ranks(config)))
    assert of_rank == config
    assert "efficiency_target" not in of_rank.snip.model_fields_set  # so the run may lower it


def test_a_resumed_run_replaces_the_points_after_its_checkpoint_in_tensorboard(
    tmp_path: Path,
) -> None:
    """Iterations 1 to 4 were done, the checkpoint is of iteration 2, and the run resumes."""
    for done, last, loss in ((0, 4, 9.0), (2, 3, 1.0)):
        config = TrainConfig(run_dir=tmp_path / "run", tensorboard_dir=tmp_path / "run" / "board")
        _, writer = make_writers(config, RunDirectory(tmp_path / "run"), done)
        assert done or not list((tmp_path / "run" / "board").iterdir())  # nothing is written yet
        for iteration in range(done + 1, last + 1):
            writer.write(Event(iteration, Metrics({"loss": loss})))
        writer.close()
    events = accumulators.EventAccumulator(str(tmp_path / "run" / "board"))
    events.Reload()
    points = [(event.step, event.value) for event in events.Scalars("snip/1_loss")]
    assert points == [(1, 9.0), (2, 9.0), (3, 1.0)]


def test_tensorboard_that_cannot_be_used_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before training, which would otherwise end without its files."""
    (tmp_path / "file").touch()
    config = TrainConfig(run_dir=tmp_path / "run", tensorboard_dir=tmp_path / "file" / "board")
    with pytest.raises(UsageError, match=r"cannot use a path: .*Not a directory"):
        make_writers(config, RunDirectory(tmp_path / "run"), 0)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UsageError, match="tensorboard was requested and is not installed"):
        make_writers(config, RunDirectory(tmp_path / "run"), 0)

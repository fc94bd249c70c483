"""Settings from YAML and flags; bad input ends in one line before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from megatron_snip.cli import train
from megatron_snip.cli.commands import build_parser
from megatron_snip.cli.train import ignored_flags, read_settings
from megatron_snip.collectives import Control
from megatron_snip.directory import mark, mark_new_run, run_id
from megatron_snip.errors import UnsupportedError, UsageError
from megatron_snip.run.state import RunState
from megatron_snip.trainer import session
from megatron_snip.trainer.checkpoint import (
    POINTER,
    Progress,
    checkpoint_path,
    latest_iteration,
    read_progress,
    resume_iteration,
    settings_of,
)
from megatron_snip.trainer.config import TrainConfig, make_train_config
from megatron_snip.trainer.session import check_run
from tests.unit.planning.build import plan_of


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


def write_checkpoint(folder: Path, iteration: int, run_id: str = "", **values: Any) -> Path:
    """Write a checkpoint without tensors."""
    path = checkpoint_path(folder, iteration)
    path.mkdir(parents=True)
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    progress = Progress(iteration, settings_of(TrainConfig(**values), 1), run_id=run_id)
    torch.save(vars(progress), path / "common.pt")
    (folder / POINTER).write_text(f"{iteration}\n")
    return folder


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
    ("--snip --snip-backend te", "use --snip-backend simulate"),
    ("--load none", "load 'none' holds no checkpoint"),
    ("--load dense --hidden-size 512", "of another model: hidden_size 256 -> 512"),
    ("--save dense", "of another run, up to iteration 20; resume .*--load"),
    ("--load damaged", "cannot load 'damaged/iter_0000020': "),
    ("--load other", "is damaged: .*iteration: "),
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
    (write_checkpoint(Path("damaged"), 20) / "iter_0000020" / "common.pt").unlink()
    other = checkpoint_path(write_checkpoint(Path("other"), 20), 20) / "common.pt"
    torch.save({**torch.load(other), "iteration": "two"}, other)
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
        load = write_checkpoint(tmp_path / name / "save", 5, run_id=identity)
        monkeypatch.chdir(tmp_path / name / ".." / "..")
        config = TrainConfig(run_dir=Path("runs/demo"), load=load, overwrite=name == names[2])
        with session.run_directory(config, read_progress(config, 5), Control()) as directory:
            assert directory is not None
            assert len(read_lines(tmp_path / name / "metrics.jsonl")) == 2  # nothing is refused yet
            directory.begin()
    assert len(read_lines(tmp_path / names[0] / "metrics.jsonl")) == 2  # it continues
    for name in names[1:]:
        assert len(read_lines(tmp_path / name / "previous-1" / "metrics.jsonl")) == 2
        assert not (tmp_path / name / "metrics.jsonl").exists()


def read_lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_a_run_resumes_from_the_latest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = write_checkpoint(tmp_path / "there", 20)
    assert resume_iteration(TrainConfig()) == 0
    same = tmp_path / "not yet"
    assert resume_iteration(TrainConfig(load=same, save=same)) == 0
    assert resume_iteration(TrainConfig(load=there)) == 20
    write_checkpoint(there, 40)
    assert resume_iteration(TrainConfig(load=there)) == 40
    monkeypatch.chdir(tmp_path)  # one folder, in two spellings
    assert resume_iteration(TrainConfig(load=there, save=Path("there"))) == 40


@pytest.mark.parametrize("is_on", [True, False])
def test_a_resume_that_turns_snip_on_or_off_says_so(
    is_on: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "SnipController", Mock())
    config = TrainConfig.model_validate({"snip": {"enabled": is_on}})
    plan = plan_of({"decoder.layers.0.mlp.linear_fc1": "fp4"})
    former = None if is_on else RunState(7, plan).to_dict()
    session.make_hook(Mock(config=config), [], Progress(7, {}, snip=former))
    (line,) = caplog.messages
    expected = {
        True: "snip: the checkpoint of iteration 7 has no SNIP state; starting from the initial",
        False: f"snip: {plan.label}, which is in the checkpoint, is not used",
    }
    assert line.startswith(expected[is_on])
    caplog.clear()
    session.make_hook(Mock(config=config), [], None)
    other = None if former else RunState(8, plan).to_dict()
    session.make_hook(Mock(config=config), [], Progress(8, {}, snip=other))
    assert not caplog.messages


@pytest.mark.parametrize("text", ["forty", "", "-1", "9" * 30])
def test_a_damaged_pointer_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / POINTER).write_text(text)
    with pytest.raises(UsageError, match="must hold a number of iterations, got"):
        latest_iteration(tmp_path)


def test_a_path_may_begin_with_the_home_that_quotes_hide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    assert make_train_config({"run_dir": "~/x"}).run_dir == Path("/somewhere/x")


RANK = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("kind", [UsageError, UnsupportedError])
def test_what_every_rank_refuses_is_printed_by_rank_0(
    monkeypatch: pytest.MonkeyPatch, kind: type[UsageError | UnsupportedError]
) -> None:
    monkeypatch.setattr(train, "train_as_rank", Mock(side_effect=kind("cannot run")))
    monkeypatch.setattr("time.sleep", lambda _: None)
    for each, text in RANK.items():
        monkeypatch.setenv(each, text)
    args = build_parser("train").parse_args(["train"])
    with pytest.raises(kind, match="cannot run"):
        train.run(args)
    monkeypatch.setenv("RANK", "1")
    assert train.run(args) == 2


def test_there_is_a_rank_for_each_gpu_that_replicas_fit_on(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig(tensor_model_parallel_size=2)
    for gpus, ranks in ((0, 2), (2, 2), (5, 4)):
        monkeypatch.setattr("torch.cuda.device_count", lambda gpus=gpus: gpus)
        assert train.default_num_ranks(config) == ranks
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(UsageError, match=r"need 2 GPUs, and this machine has 1; .* the CPU"):
        train.default_num_ranks(config)

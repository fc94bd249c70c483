"""Bad input ends before anything is written, in one line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_snip.__main__ import main
from megatron_snip.directory import mark
from megatron_snip.errors import UsageError
from megatron_snip.options import Option
from megatron_snip.planning.plan import PrecisionPlan, assignment_digest, write_plan
from megatron_snip.trainer.checkpoint_folder import CheckpointFolder, SavedRun
from megatron_snip.trainer.checks import check_data, check_run, resume_step
from megatron_snip.trainer.config import TrainConfig
from megatron_snip.trainer.corpus import _write_indexed
from megatron_snip.trainer.config import linear_shapes


def snip_config(run_dir: Path, **snip: Any) -> TrainConfig:
    return TrainConfig(run_dir=run_dir, num_layers=2, snip={"enabled": True, **snip})


def write_fitting_plan(config: TrainConfig, path: Path, drop: int = 0) -> None:
    names = [linear.name for linear in linear_shapes(config)][drop:]
    linears = {name: Option.uniform("fp8") for name in names}
    plan = PrecisionPlan(
        step=3,
        policy="snip",
        status="optimal",
        objective=1.0,
        bound=1.0,
        seconds=0.1,
        target=0.5,
        efficiency=0.5,
        stages=(0.5,),
        linears=linears,
        digest=assignment_digest(linears),
    )
    write_plan(plan, path)


def test_a_plan_file_must_fit_the_model(tmp_path: Path) -> None:
    config = snip_config(tmp_path / "run", plan_file=tmp_path / "plan.json")
    write_fitting_plan(config, tmp_path / "plan.json")
    check_run(config, 1)
    write_fitting_plan(config, tmp_path / "plan.json", drop=1)
    with pytest.raises(UsageError, match=r"missing: decoder\.layers\.0\.self_attention"):
        check_run(config, 1)


@pytest.mark.parametrize(
    ("snip", "message"),
    [
        ({"pins": "*mlp*=fp8", "efficiency_target": 0.9}, "the best reachable target is 0.347826"),
        ({"pins": "nothing=fp8"}, "no linear's name matches"),
        ({"policy": "clever"}, "unknown policy 'clever'"),
        ({"plan_file": "nowhere.json"}, "cannot read plan file 'nowhere.json'"),
    ],
)
def test_plans_out_of_reach_are_refused(tmp_path: Path, snip: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_run(snip_config(tmp_path / "run", **snip), 1)


def test_every_stage_must_reach_the_target_where_that_is_asked(tmp_path: Path) -> None:
    pins = {"pins": "decoder.layers.0.*=fp8", "efficiency_target": 0.5}
    config = snip_config(tmp_path / "run", **pins)
    check_run(config.model_copy(update={"pipeline_model_parallel_size": 2}), 2)
    config = snip_config(tmp_path / "run", **pins, pipeline_balance="stage")
    with pytest.raises(UsageError, match="stage 0"):
        check_run(config.model_copy(update={"pipeline_model_parallel_size": 2}), 2)


def test_data_must_be_there_and_fit_the_vocabulary(tmp_path: Path) -> None:
    prefix = tmp_path / "text"
    with pytest.raises(UsageError, match="does not exist"):
        check_data(prefix, 300)
    _write_indexed(prefix, [("a", b"hello"), ("b", b"world")])
    check_data(prefix, 257)
    with pytest.raises(UsageError, match="token id 256, vocab_size is 256"):
        check_data(prefix, 256)
    with pytest.raises(UsageError, match="needs vocab_size"):
        check_data(prefix, None)
    np.zeros(0, dtype=np.uint16).tofile(f"{prefix}.bin")
    with pytest.raises(UsageError, match="is empty"):
        check_data(prefix, 257)
    prefix.with_suffix(".idx").write_bytes(b"something else")
    with pytest.raises(UsageError, match="not in Megatron's indexed format"):
        check_data(prefix, 257)


def test_run_directories_that_cannot_be_made_or_hold_another_run_are_refused(
    tmp_path: Path,
) -> None:
    def check(path: Path, **values: Any) -> None:
        check_run(TrainConfig(run_dir=path, **values), 1)

    check(tmp_path / "new" / "run")
    for name in ("slurm-123.out", ".gitignore", "thesis.tex"):
        (tmp_path / name).touch()
    check(tmp_path)
    with pytest.raises(UsageError, match="is a file"):
        check(tmp_path / "thesis.tex")
    with pytest.raises(UsageError, match="cannot be made"):
        check(tmp_path / "thesis.tex" / "run")
    mark(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(UsageError, match="holds another run; continue it with --load"):
        check(tmp_path)
    check(tmp_path, overwrite=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    with pytest.raises(UsageError, match="cannot be"):
        check_run(TrainConfig(run_dir=tmp_path / "run"), 1)
    with pytest.raises(UsageError, match="cannot be read and written"):
        check_run(TrainConfig(run_dir=tmp_path), 1)


@pytest.mark.parametrize(
    "words",
    [
        ["--no-such-flag"],
        ["--hidden-size", "250"],
        ["--snip", "--snip-efficiency-target", "1.5"],
        ["--tensor-model-parallel-size", "2", "--nproc-per-node", "1"],
        ["--nproc-per-node", "none"],
        ["--data-path", "nowhere", "--vocab-size", "9"],
        ["--config", "nowhere.yaml"],
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--run-dir", str(tmp_path / "run"), *words]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert said.err.startswith("megatron-snip: error: ")
    assert not (tmp_path / "run").exists()


# ---- checkpoints ------------------------------------------------------------------------------


def checkpoint(folder: Path, step: int, **values: Any) -> Path:
    """A folder with one checkpoint that looks whole."""
    place = CheckpointFolder(folder)
    (place.begin(step) / "metadata.json").write_text("{}")
    place.finish(step, SavedRun(TrainConfig(**values).model_dump(mode="json"), 1))
    return folder


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"save_interval": 5}, "save_interval needs save"),
        ({"ckpt_step": 5}, "ckpt_step needs load"),
        ({"load": "none"}, "load '.*none' holds no checkpoint"),
        ({"load": "none", "overwrite": True}, "load '.*none' holds no checkpoint"),
        ({"load": "there", "ckpt_step": 30}, "iter_0000030' is not a whole checkpoint"),
        ({"load": "there", "hidden_size": 512}, "of another model: hidden_size 256 -> 512"),
        ({"save": "there"}, "holds checkpoints of another run, up to step 20; go on .*--load"),
        ({"save": "file"}, "save '.*file' is not a folder"),
        ({"save": "file/below"}, "save '.*below' cannot be made in"),
    ],
)
def test_folders_of_checkpoints_are_checked(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    checkpoint(tmp_path / "there", 20)
    (tmp_path / "file").write_text("")
    placed = {k: tmp_path / v if k in ("save", "load") else v for k, v in values.items()}
    with pytest.raises(UsageError, match=message):
        check_run(TrainConfig(run_dir=tmp_path / "run", **placed), 1)


def test_where_a_run_goes_on(tmp_path: Path) -> None:
    there = checkpoint(tmp_path / "there", 20)
    assert resume_step(TrainConfig()) == 0
    same = tmp_path / "not yet"
    assert resume_step(TrainConfig(load=same, save=same)) == 0
    assert resume_step(TrainConfig(load=there)) == 20
    checkpoint(there, 40)
    assert resume_step(TrainConfig(load=there)) == 40
    assert resume_step(TrainConfig(load=there, ckpt_step=20)) == 20


def test_another_order_of_samples_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    there = checkpoint(tmp_path / "there", 20)
    check_run(TrainConfig(run_dir=tmp_path / "run", load=there, seed=4321), 1)
    assert "(seed 1234 -> 4321)" in caplog.text

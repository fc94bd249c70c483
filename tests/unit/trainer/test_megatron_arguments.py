"""A file of Megatron arguments means to the trainer what it means to Megatron."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_snip.__main__ import main
from megatron_snip.cli.commands import build_parser
from megatron_snip.cli.train import read_settings
from megatron_snip.errors import UsageError
from megatron_snip.trainer.config import TrainConfig, make_train_config
from megatron_snip.trainer.megatron_arguments import MEGATRON_DEFAULTS

LLAMA = """
--num-layers 4 --hidden-size 256 --num-attention-heads 4
--seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 --train-iters 20 --lr 1e-3
--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope
"""


def read(folder: Path, text: str, *words: str) -> TrainConfig:
    file = folder / "model.args"
    file.write_text(text)
    return read_settings(build_parser("train").parse_args(["train", f"@{file}", *words]))


def test_what_is_not_given_takes_megatrons_default(tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA)
    fields = TrainConfig.model_fields
    for name, value in MEGATRON_DEFAULTS.items():
        assert getattr(config, name) == value
        assert fields[name].default != value, f"{name}: no need to list it"
    assert read(tmp_path, LLAMA, "--bf16", "--hidden-dropout", "0").bf16


def test_without_a_file_the_trainers_own_defaults_hold() -> None:
    config = read_settings(build_parser("train").parse_args(["train", "--swiglu"]))
    assert config == make_train_config({})


def test_yaml_and_flags_win_over_megatrons_defaults(tmp_path: Path) -> None:
    yaml = tmp_path / "more.yaml"
    yaml.write_text("weight_decay: 0.3\neval_iters: 7\n")
    config = read(tmp_path, LLAMA, "--config", str(yaml), "--eval-iters", "8")
    assert (config.weight_decay, config.eval_iters) == (0.3, 8)


@pytest.mark.parametrize("flag", ["--swiglu", "--disable-bias-linear", "--normalization RMSNorm"])
def test_another_model_is_refused(tmp_path: Path, flag: str) -> None:
    with pytest.raises(UsageError, match=f"without {flag} Megatron builds a model other"):
        read(tmp_path, LLAMA.replace(flag, ""))


def test_a_fixed_setting_of_another_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--normalization: got 'LayerNorm'; this trainer has"):
        read(tmp_path, LLAMA, "--normalization", "LayerNorm")


def test_query_groups_need_their_switch(tmp_path: Path) -> None:
    groups = ["--num-query-groups", "2"]
    with pytest.raises(UsageError, match="--group-query-attention and --num-query-groups together"):
        read(tmp_path, LLAMA, *groups)
    with pytest.raises(UsageError, match="--group-query-attention and --num-query-groups together"):
        read(tmp_path, LLAMA, "--group-query-attention")
    assert read(tmp_path, LLAMA, "--group-query-attention", *groups).query_groups == 2
    assert read(tmp_path, LLAMA).query_groups == 4


def test_experts_are_those_of_megatron(tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA, "--num-experts", "8", "--expert-model-parallel-size", "4")
    assert (config.num_experts, config.expert_model_parallel_size) == (8, 4)
    assert (config.moe_router_topk, config.moe_token_dispatcher_type) == (2, "allgather")
    assert (config.moe_router_load_balancing_type, config.moe_aux_loss_coeff) == ("aux_loss", 0.0)


def test_the_null_tokenizer_adds_the_end_of_document(tmp_path: Path) -> None:
    words = ["--vocab-size", "99"]
    assert read(tmp_path, LLAMA, *words).token_ids == 99
    assert read(tmp_path, LLAMA, *words, "--tokenizer-type", "NullTokenizer").token_ids == 100


@pytest.mark.parametrize("words", [["--use-flash-attn"], ["@none.args"]])
def test_other_flags_and_files_are_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *words]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("megatron-snip: error:") and words[0].lstrip("@") in errors
    assert errors.count("\n") == 1

"""TrainConfig: one record from YAML and flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_snip.cli.commands import build_parser
from megatron_snip.cli.train import read_settings
from megatron_snip.errors import UsageError
from megatron_snip.trainer.config import TrainConfig, check_ranks


def load(file: Path, *words: str) -> TrainConfig:
    words = ("train", "--config", str(file), *words)
    return read_settings(build_parser("train").parse_args(words))


def test_flags_win_over_the_file_field_by_field(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("num_layers: 8\nlr: 0.001\nsnip: {interval: 50, efficiency_target: 0.5}\n")
    config = load(file, "--lr", "2e-3", "--snip-interval", "7", "--no-bf16", "--snip")
    assert (config.num_layers, config.lr, config.bf16) == (8, 2e-3, False)
    assert (config.snip.interval, config.snip.efficiency_target) == (7, 0.5)
    assert config.snip.enabled


def test_defaults_that_follow_other_fields() -> None:
    config = TrainConfig(hidden_size=384, num_attention_heads=6)
    assert config.ffn_width == 1024
    assert config.query_groups == 6
    assert config.padded_vocab_size == 384
    assert TrainConfig(make_vocab_size_divisible_by=1).padded_vocab_size == 257


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hiden_size: 3", "unknown key 'hiden_size'"),
        ("snip: {interval_s: 3}", "unknown key 'snip.interval_s'"),
        ("snip: 3", "'snip' must hold a mapping"),
        ("lr: fast", "lr: .* got 'fast'"),
        ("snip: {efficiency_target: 1.5}", "efficiency_target: .* less than or equal to 1"),
    ],
)
def test_bad_settings_are_one_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        load(file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_size": 252}, r"hidden_size \(252\) .* 2 x num_attention_heads \(8\)"),
        ({"num_query_groups": 3}, r"num_attention_heads \(4\) .* num_query_groups \(3\)"),
        (
            {"ffn_hidden_size": 129, "tensor_model_parallel_size": 2},
            r"ffn_hidden_size \(129\) .* tensor_model_parallel_size \(2\)",
        ),
        ({"pipeline_model_parallel_size": 3}, r"num_layers \(4\) .* \(3\)"),
        ({"num_layers_per_virtual_pipeline_stage": 1}, "pipeline_model_parallel_size is 1"),
        (
            {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 4},
            r"layers per pipeline stage \(2\)",
        ),
        (
            {"sequence_parallel": True, "tensor_model_parallel_size": 2, "seq_length": 63},
            r"seq_length under sequence_parallel \(63\)",
        ),
        ({"overlap_param_gather": True}, "needs use_distributed_optimizer"),
        ({"min_lr": 1.0}, "min_lr 1 must not be larger than lr 0.003"),
        ({"lr_warmup_iters": 150}, "must be less than train_iters 150"),
        ({"num_experts": 4, "moe_router_topk": 5}, "moe_router_topk 5 is more than num_experts 4"),
        (
            {"num_experts": 4, "tensor_model_parallel_size": 2},
            "tensor_model_parallel_size 2 needs sequence_parallel",
        ),
        (
            {"num_experts": 4, "expert_model_parallel_size": 3},
            r"num_experts \(4\) .* expert_model_parallel_size \(3\)",
        ),
        (
            {"num_experts": 4, "moe_ffn_hidden_size": 65, "expert_tensor_parallel_size": 2},
            r"moe_ffn_hidden_size \(65\) .* expert_tensor_parallel_size \(2\)",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TrainConfig(**values)


@pytest.mark.parametrize(
    ("values", "ranks", "message"),
    [
        ({"tensor_model_parallel_size": 2}, 3, "a multiple of 2 ranks, got 3"),
        ({"num_experts": 4, "expert_model_parallel_size": 2}, 1, "size 2 need a multiple of 2"),
        ({"global_batch_size": 6}, 4, r"global_batch_size \(6\) .* data-parallel ranks \(4\)"),
        (
            {
                "pipeline_model_parallel_size": 2,
                "num_layers_per_virtual_pipeline_stage": 1,
                "global_batch_size": 3,
            },
            2,
            r"microbatches per iteration of an interleaved pipeline \(3\)",
        ),
    ],
)
def test_numbers_of_ranks_that_do_not_fit_are_refused(
    values: dict[str, Any], ranks: int, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        check_ranks(TrainConfig(**values), ranks)

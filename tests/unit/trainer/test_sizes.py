"""What must divide what, and the linears that follow."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_snip.errors import UsageError
from megatron_snip.trainer.config import TrainConfig
from megatron_snip.trainer.config import (
    check_ranks,
    linear_shapes,
    stage_of_layer,
    tile_warnings,
)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_size": 250}, r"hidden_size \(250\) .* num_attention_heads \(4\)"),
        ({"num_query_groups": 3}, r"num_attention_heads \(4\) .* num_query_groups \(3\)"),
        ({"tensor_model_parallel_size": 3}, r"tensor_model_parallel_size \(3\)"),
        (
            {"num_query_groups": 2, "tensor_model_parallel_size": 4},
            r"num_query_groups \(2\) .* tensor_model_parallel_size \(4\)",
        ),
        (
            {"ffn_hidden_size": 129, "tensor_model_parallel_size": 2},
            r"ffn_hidden_size \(129\) .* tensor_model_parallel_size \(2\)",
        ),
        ({"pipeline_model_parallel_size": 3}, r"num_layers \(4\) .* \(3\)"),
        ({"num_layers_per_virtual_pipeline_stage": 1}, "pipeline_model_parallel_size is 1"),
        (
            {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 4},
            r"layers a pipeline stage \(2\)",
        ),
        (
            {"sequence_parallel": True, "tensor_model_parallel_size": 2, "seq_length": 63},
            r"seq_length under sequence_parallel \(63\)",
        ),
        ({"context_parallel_size": 2}, "Transformer Engine"),
        ({"overlap_param_gather": True}, "needs use_distributed_optimizer"),
        ({"recompute_granularity": "full"}, "needs recompute_method"),
        ({"recompute_method": "block"}, "belong to recompute_granularity full"),
        ({"hidden_size": 12}, "must be even for rotary"),
        ({"seq_length": 64, "max_position_embeddings": 32}, "longer than max_position"),
        ({"min_lr": 1.0}, "min_lr 1 must not be larger than lr 0.003"),
        ({"lr_warmup_iters": 150}, "must be smaller than train_iters 150"),
        ({"expert_model_parallel_size": 2}, "spreads experts; give num_experts"),
        ({"num_experts": 4, "moe_router_topk": 5}, "moe_router_topk 5 is more than num_experts 4"),
        ({"num_experts": 4, "moe_router_topk": 1}, "needs moe_router_pre_softmax"),
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
        ({"tensor_model_parallel_size": 2}, 1, "needs 2 ranks, got 1"),
        ({"tensor_model_parallel_size": 2}, 3, "use a multiple of 2"),
        ({"num_experts": 4, "expert_model_parallel_size": 2}, 1, "size 2 needs 2 ranks, got 1"),
        ({"global_batch_size": 6}, 4, r"global_batch_size \(6\) .* data-parallel ranks \(4\)"),
        (
            {
                "pipeline_model_parallel_size": 2,
                "num_layers_per_virtual_pipeline_stage": 1,
                "global_batch_size": 3,
            },
            2,
            r"microbatches a step under an interleaved pipeline \(3\)",
        ),
    ],
)
def test_numbers_of_ranks_that_do_not_fit_are_refused(
    values: dict[str, Any], ranks: int, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        check_ranks(TrainConfig(**values), ranks)


def test_ranks_that_fit_pass() -> None:
    config = TrainConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    for ranks in (4, 8, 16, 32):
        check_ranks(config, ranks)
        assert config.num_microbatches(ranks) * (ranks // 4) == 8


def test_linears_have_megatrons_shapes() -> None:
    config = TrainConfig(num_layers=1, num_query_groups=2, tensor_model_parallel_size=2)
    shapes = {x.name: (x.out_features, x.in_features, x.shard) for x in linear_shapes(config)}
    assert shapes == {
        "decoder.layers.0.self_attention.linear_qkv": (512, 256, (256, 256)),
        "decoder.layers.0.self_attention.linear_proj": (256, 256, (256, 128)),
        "decoder.layers.0.mlp.linear_fc1": (1280, 256, (320, 256)),
        "decoder.layers.0.mlp.linear_fc2": (256, 640, (256, 320)),
    }


def test_experts_share_a_name_and_a_token_meets_some_of_them() -> None:
    config = TrainConfig(
        num_layers=1,
        num_experts=8,
        moe_router_topk=3,
        moe_ffn_hidden_size=512,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        expert_tensor_parallel_size=1,
    )
    fc1, fc2 = linear_shapes(config)[2:]
    assert (fc1.name, fc1.shard) == ("decoder.layers.0.mlp.experts.linear_fc1", (512, 256))
    assert (fc2.name, fc2.shard) == ("decoder.layers.0.mlp.experts.linear_fc2", (256, 512))
    assert fc1.flops_per_token == 6 * 3 * 1024 * 256
    assert fc2.flops_per_token == 6 * 3 * 256 * 512


def test_experts_are_dealt_to_data_parallel_ranks() -> None:
    experts = {"num_experts": 4, "expert_model_parallel_size": 4}
    config = TrainConfig(**experts)
    assert (config.model_parallel_size, config.data_parallel_size(4)) == (4, 4)
    assert config.num_microbatches(4) == 2
    dealt = TrainConfig(**experts, tensor_model_parallel_size=2, sequence_parallel=True)
    assert (dealt.expert_tensor_size, dealt.model_parallel_size) == (2, 8)
    alone = dealt.model_copy(update={"expert_tensor_parallel_size": 1})
    assert (alone.model_parallel_size, alone.data_parallel_size(4)) == (4, 2)


def test_an_interleaved_pipeline_deals_layers_round() -> None:
    sizes = {"num_layers": 8, "pipeline_model_parallel_size": 2}
    plain = TrainConfig(**sizes)
    assert [stage_of_layer(plain, i) for i in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    dealt = TrainConfig(**sizes, num_layers_per_virtual_pipeline_stage=2)
    assert [stage_of_layer(dealt, i) for i in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_shards_that_cut_tiles_are_named_once_a_kind() -> None:
    assert tile_warnings(TrainConfig(ffn_hidden_size=512)) == ()
    said = tile_warnings(TrainConfig(ffn_hidden_size=192, num_layers=3))
    assert [text.split(":")[0] for text in said] == ["linear_fc1", "linear_fc2"]

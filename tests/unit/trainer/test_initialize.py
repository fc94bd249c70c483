"""Initial weights: functions of the global name, cut into shards."""

from __future__ import annotations

import pytest
import torch

from megatron_snip.trainer.config import TrainConfig
from megatron_snip.trainer.initialize import shard, whole_tensor

QKV = "decoder.layers.3.self_attention.linear_qkv.weight"
PROJ = "decoder.layers.3.self_attention.linear_proj.weight"
FC1 = "decoder.layers.3.mlp.linear_fc1.weight"


def test_a_weight_depends_on_its_name_and_the_seed_alone() -> None:
    config = TrainConfig()
    torch.manual_seed(1)
    first = whole_tensor(QKV, (96, 32), config)
    torch.manual_seed(2)
    assert torch.equal(first, whole_tensor(QKV, (96, 32), config))
    assert torch.equal(
        first, whole_tensor(QKV, (96, 32), TrainConfig(tensor_model_parallel_size=2))
    )
    assert not torch.equal(first, whole_tensor(QKV.replace("3", "2"), (96, 32), config))
    assert not torch.equal(first, whole_tensor(QKV, (96, 32), TrainConfig(seed=5)))


def test_initializing_leaves_the_random_stream_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    whole_tensor(QKV, (8, 8), TrainConfig())
    assert torch.equal(torch.rand(2), expected)


def test_standard_deviations_are_megatrons() -> None:
    config = TrainConfig(num_layers=8)
    plain = whole_tensor(FC1, (512, 512), config).std().item()
    residual = whole_tensor(PROJ, (512, 512), config).std().item()
    assert plain == pytest.approx(0.02, rel=0.01)
    assert residual == pytest.approx(0.02 / 4, rel=0.01)  # sqrt(2 * 8) = 4
    assert torch.equal(whole_tensor("decoder.final_layernorm.weight", (7,), config), torch.ones(7))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_shards_are_slices_of_the_whole(size: int) -> None:
    whole = torch.arange(16 * 8).view(16, 8)
    for rank in range(size):
        rows, columns = 16 // size, 8 // size
        expected = whole[rank * rows : (rank + 1) * rows]
        assert torch.equal(shard(QKV, whole, 0, rank, size), expected)
        expected = whole[:, rank * columns : (rank + 1) * columns]
        assert torch.equal(shard(PROJ, whole, 1, rank, size), expected)
        half = 8 // size
        gate, up = whole[:8], whole[8:]
        cut = slice(rank * half, (rank + 1) * half)
        assert torch.equal(shard(FC1, whole, 0, rank, size), torch.cat([gate[cut], up[cut]]))
        assert torch.equal(shard("decoder.final_layernorm.weight", whole, None, rank, size), whole)

"""Shards of master weights: cast one by one, they give the bytes of the complete weight."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer
from transformer_engine.pytorch.tensor.utils import (
    post_all_gather_processing,
    quantize_master_weights,
)

E4M3 = DType.kFloat8E4M3
QUANTIZERS: dict[str, Callable[[], Any]] = {
    "tensorwise": lambda: Float8CurrentScalingQuantizer(E4M3, device="cpu"),
    "blockwise": lambda: Float8BlockQuantizer(
        E4M3, rowwise=True, columnwise=True, block_scaling_dim=2
    ),
    "mxfp8": lambda: MXFP8Quantizer(E4M3),
    "nvfp4": lambda: NVFP4Quantizer(
        rowwise=True, columnwise=True, with_2d_quantization=True, with_rht=False
    ),
}
ROWS, COLUMNS = 160, 256
CUT = 64 * COLUMNS + 40
"""Inside a row and inside a tile: shards end where a buffer does."""


@pytest.fixture
def group() -> Iterator[Any]:
    """A group of this process alone; that of tests/te, where these ran before in this process."""
    if dist.is_initialized():
        yield dist.group.WORLD
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("name", QUANTIZERS)
def test_shards_give_the_bytes_of_the_complete_weight(
    name: str, group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(3)
    weight = torch.randn(ROWS, COLUMNS)
    weight[:32] *= 30
    truth = QUANTIZERS[name]()(weight.bfloat16())
    found = QUANTIZERS[name]()(torch.zeros_like(weight).bfloat16())
    flat = weight.flatten()
    shards = [(flat[:CUT], 0), (flat[CUT:], CUT)]
    # Both ranks' amaxes: the one that runs gets what the other has found.
    reduced: list[list[torch.Tensor]] = []

    def of_each_rank(tensor: torch.Tensor, **_: Any) -> None:
        seen.append(tensor.clone())
        for other in reduced:
            torch.maximum(tensor, other[len(seen) - 1], out=tensor)

    monkeypatch.setattr(dist, "all_reduce", of_each_rank)
    for is_complete in (False, True):
        for shard, start in shards:
            seen: list[torch.Tensor] = []
            quantize_master_weights([found], [shard], [start], group)
            if not is_complete:
                reduced.append(seen)
    post_all_gather_processing(found)
    assert torch.equal(found.dequantize(), truth.dequantize())
    for key, value in truth.get_metadata().items():
        if isinstance(value, torch.Tensor):
            own = found.get_metadata()[key]
            # Scales are padded, with zeros or with what an amax of 0 gives.
            assert torch.equal(own[value != 0], value[value != 0]), key

"""A shard's random numbers are its part of the whole tensor's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_snip.streams import grad_output_stream
from megatron_snip.topology import LinearKind, Placement, TensorAxis
from megatron_snip.types import Gemm, Operand

ROWS = 32


def placement(kind: LinearKind, num_chunks: int = 1) -> Placement:
    return Placement("decoder.layers.1.mlp.linear_fc1", 0, kind, 64, 96, num_chunks=num_chunks)


def shards(whole: Placement, size: int) -> list[Placement]:
    return [replace(whole, tensor=TensorAxis(rank, size)) for rank in range(size)]


def bits(of: Placement, cols: int) -> torch.Tensor:
    stream = grad_output_stream(3, of, 5, 2).for_role(Operand.GRAD_OUTPUT, Gemm.DGRAD)
    return stream.bits16(range(ROWS), range(cols), cols)


@pytest.mark.parametrize("size", [2, 4])
def test_column_shards_draw_their_columns(size: int) -> None:
    whole = placement("column")
    parts = [bits(shard, 96 // size) for shard in shards(whole, size)]
    assert torch.equal(torch.cat(parts, 1), bits(whole, 96))


@pytest.mark.parametrize("size", [2, 4])
def test_gated_shards_draw_from_both_halves(size: int) -> None:
    whole = placement("column", num_chunks=2)
    gate, up = bits(whole, 96).chunk(2, 1)
    for rank, shard in enumerate(shards(whole, size)):
        wanted = torch.cat([gate.chunk(size, 1)[rank], up.chunk(size, 1)[rank]], 1)
        assert torch.equal(bits(shard, 96 // size), wanted)


def test_row_shards_hold_all_of_grad_output_and_draw_alike() -> None:
    whole = placement("row")
    for shard in shards(whole, 2):
        assert torch.equal(bits(shard, 96), bits(whole, 96))


def test_ranks_that_hold_a_weight_whole_draw_alike() -> None:
    whole = placement("column")
    second = replace(whole, tensor=TensorAxis(rank=1))
    assert torch.equal(bits(second, 96), bits(whole, 96))

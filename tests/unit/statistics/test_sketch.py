"""Sketches of microbatches' sums: unbiased, additive, the same over shards, of known noise."""

from __future__ import annotations

import pytest
import torch

from megatron_snip.statistics.sketch import WIDTH, Signs, across, own_squares, sketch
from megatron_snip.topology import LinearKind, Placement, TensorAxis

K, N = 48, 64
CPU = torch.device("cpu")
DRAWS = 200


def placement(
    kind: LinearKind = "column", rank: int = 0, size: int = 1, chunks: int = 1
) -> Placement:
    return Placement("decoder.layers.1.x", 0, kind, K, N, TensorAxis(rank, size), chunks)


def signs(place: Placement, draw: int = 0) -> Signs:
    return Signs.of(place, 5, 7, draw, CPU)


def estimates(microbatches: torch.Tensor, matrix: bool = False) -> torch.Tensor:
    """What `across` gives in each of DRAWS draws, for microbatches [m, ...]."""
    found = []
    for draw in range(DRAWS):
        drawn = signs(placement(), draw)
        sketches = [
            drawn.of_matrix(one) if matrix else sketch(drawn.output, one) for one in microbatches
        ]
        found.append(across(own_squares(torch.stack(sketches)).sum(0)))
    return torch.stack(found)


@pytest.mark.parametrize("common", [0.0, 1.0])
def test_the_mean_is_what_microbatches_share(common: float) -> None:
    generator = torch.Generator().manual_seed(1)
    sums = torch.randn((6, N), generator=generator) + common * torch.randn(N, generator=generator)
    whole, apart = sums.sum(0).square().sum(), sums.square().sum()
    found = estimates(sums)
    noise = (2 / WIDTH) ** 0.5 * float(whole + apart)
    assert found.std() < 1.2 * noise
    assert found.mean().item() == pytest.approx(float(whole - apart), abs=4 * noise / DRAWS**0.5)


def test_a_matrix_is_sketched_without_bias() -> None:
    generator = torch.Generator().manual_seed(2)
    matrices = torch.randn((3, N, K), generator=generator) + torch.randn(
        (N, K), generator=generator
    )
    whole, apart = matrices.sum(0).square().sum(), matrices.square().sum()
    found = estimates(matrices, matrix=True)
    assert found.mean().item() == pytest.approx(float(whole - apart), rel=0.1)
    rank_one = torch.ones((2, N, K))  # the worst case: products of signs scatter twice as much
    whole, apart = rank_one.sum(0).square().sum(), rank_one.square().sum()
    found = estimates(rank_one, matrix=True)
    assert found.mean().item() == pytest.approx(float(whole - apart), rel=0.15)
    assert found.std() < 1.3 * (8 / WIDTH) ** 0.5 * float(whole)


def test_one_microbatch_shares_nothing() -> None:
    drawn = signs(placement())
    one = own_squares(sketch(drawn.input, torch.randn(K))[None])
    assert across(one).item() == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(("kind", "chunks"), [("column", 1), ("column", 2), ("row", 1)])
def test_shards_draw_their_part_of_the_whole(kind: LinearKind, chunks: int) -> None:
    whole = signs(placement(kind, chunks=chunks))
    shards = [signs(placement(kind, rank, 2, chunks)) for rank in range(2)]
    sharded, full = ("output", "input") if kind == "column" else ("input", "output")
    halves = [getattr(s, sharded).chunk(chunks, 1) for s in shards]
    joined = torch.cat([h[c] for c in range(chunks) for h in halves], dim=1)
    assert torch.equal(joined, getattr(whole, sharded))
    for shard in shards:
        assert torch.equal(getattr(shard, full), getattr(whole, full))
        assert torch.equal(shard.whole, whole.whole)


def test_draws_and_steps_differ() -> None:
    first, other = signs(placement()), signs(placement(), 1)
    assert set(first.output.unique().tolist()) == {-1.0, 1.0}
    assert not torch.equal(first.output, other.output)
    assert not torch.equal(first.output, Signs.of(placement(), 5, 8, 0, CPU).output)


def test_nan_stays() -> None:
    drawn = signs(placement())
    sums = torch.full((N,), torch.nan)
    assert across(own_squares(sketch(drawn.output, sums)[None]).sum(0)).isnan()

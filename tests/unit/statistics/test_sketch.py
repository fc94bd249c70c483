"""Sketches of microbatches' sums: unbiased, additive, the same over shards, of known noise."""

from __future__ import annotations

import pytest
import torch

from megatron_snip.statistics.sketch import WIDTH, Sketcher, SketchSigns, across, own_squares
from megatron_snip.topology import LinearKind, Placement, TensorAxis

K, N = 48, 64
CPU = torch.device("cpu")
DRAWS = 200


def placement(
    kind: LinearKind = "column",
    rank: int = 0,
    size: int = 1,
    chunks: int = 1,
    expert: int | None = None,
) -> Placement:
    axis = TensorAxis(rank, size)
    return Placement("decoder.layers.1.x", 0, kind, K, N, axis, chunks, expert)


def sketcher(place: Placement, draw: int = 0) -> Sketcher:
    return SketchSigns(seed=5, step=7).sketcher(place, draw, CPU)


def estimates(microbatches: torch.Tensor, matrix: bool = False) -> torch.Tensor:
    """What `across` gives in each of DRAWS draws, for microbatches [m, ...]."""
    found = []
    for draw in range(DRAWS):
        drawn = sketcher(placement(), draw)
        sketches = [
            drawn.of_matrix(one) if matrix else drawn.of_outputs(one) for one in microbatches
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
    one = own_squares(sketcher(placement()).of_inputs(torch.randn(K))[None])
    assert across(one).item() == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(("kind", "chunks"), [("column", 1), ("column", 2), ("row", 1)])
def test_shards_draw_their_part_of_the_whole(kind: LinearKind, chunks: int) -> None:
    whole = sketcher(placement(kind, chunks=chunks))
    shards = [sketcher(placement(kind, rank, 2, chunks)) for rank in range(2)]
    sharded, full = ("output", "input") if kind == "column" else ("input", "output")
    halves = [getattr(s, sharded).chunk(chunks, 1) for s in shards]
    joined = torch.cat([h[c] for c in range(chunks) for h in halves], dim=1)
    assert torch.equal(joined, getattr(whole, sharded))
    for shard in shards:
        assert torch.equal(getattr(shard, full), getattr(whole, full))
        assert torch.equal(shard.whole, whole.whole)


def test_draws_steps_and_axes_differ() -> None:
    first, other = sketcher(placement()), sketcher(placement(), 1)
    assert set(first.output.unique().tolist()) == {-1.0, 1.0}
    assert not torch.equal(first.output, other.output)
    assert not torch.equal(first.output[:, :K], first.input)
    assert not torch.equal(first.whole, other.whole)
    later = SketchSigns(5, 8).sketcher(placement(), 0, CPU)
    assert not torch.equal(first.output, later.output)


def test_a_sum_over_all_channels_keeps_its_square() -> None:
    """One channel has no other to mix with: |z|^2 is exact, and draws lie apart."""
    total = torch.tensor([3.0])
    z = [sketcher(placement(), draw).of_whole(total) for draw in (0, 1, WIDTH - 1)]
    assert z[0].square().sum().item() == pytest.approx(9.0)
    assert (z[0] @ z[1]).item() == (z[0] @ z[2]).item() == 0.0


@pytest.mark.parametrize("experts", [(0, 5), (3, 3 + WIDTH), (3, 3 + 2 * WIDTH)])
def test_experts_of_a_layer_do_not_mix(experts: tuple[int, int]) -> None:
    """With the same sums, what two experts share in a row of the table is chance."""
    sums = torch.randn(N, generator=torch.Generator().manual_seed(3))
    found = []
    for draw in range(DRAWS):
        both = [sketcher(placement(expert=e), draw).of_outputs(sums) for e in experts]
        found.append(across(own_squares(torch.stack(both)).sum(0)))
    square = sums.square().sum()
    assert abs(torch.stack(found).mean()) < 0.1 * square
    met = 0.0  # experts that are WIDTH apart meet, with random signs
    for draw in range(DRAWS):
        one, other = (sketcher(placement(expert=e), draw).of_whole(torch.ones(1)) for e in experts)
        met += (one @ other).item()
    assert abs(met) < 4 * DRAWS**0.5
    assert met == 0.0 or (experts[1] - experts[0]) % WIDTH == 0


def test_a_width_is_drawn_once() -> None:
    signs = SketchSigns(5, 7)
    first = signs.sketcher(placement(), 0, CPU)
    other = signs.sketcher(placement(expert=3), 0, CPU)
    assert other.input is first.input
    assert other.shift == 3


def test_nan_stays() -> None:
    sums = torch.full((N,), torch.nan)
    assert across(own_squares(sketcher(placement()).of_outputs(sums)[None]).sum(0)).isnan()

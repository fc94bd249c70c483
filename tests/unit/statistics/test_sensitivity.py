"""D out of AdamW's moments: factored, from ranges of a flattened weight."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from megatron_snip.statistics import sensitivity as module
from megatron_snip.statistics.optimizer_state import Shard, optimizer_shards
from megatron_snip.statistics.sensitivity import PlannedWeight, gather_sensitivities
from megatron_snip.topology import Placement, Topology

ROWS, COLS, STEP = 6, 4, 5


def weight_and_moments(separable: bool) -> tuple[PlannedWeight, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    weight = torch.nn.Parameter(torch.randn(ROWS, COLS, generator=g))
    second = torch.rand(ROWS, 1, generator=g) * torch.rand(1, COLS, generator=g) + 0.0
    if not separable:
        second = torch.rand(ROWS, COLS, generator=g)
    first = torch.randn(ROWS * COLS, generator=g)
    place = Placement("decoder.layers.0.mlp.linear_fc1", 0, "column", COLS, ROWS)
    return PlannedWeight(place, weight), first, second.reshape(-1)


def shard(first: torch.Tensor, second: torch.Tensor, start: int, end: int) -> Shard:
    weight = torch.nn.Parameter(torch.zeros(ROWS, COLS))
    optimizer = torch.optim.AdamW([weight], betas=(0.9, 0.95), eps=0.0)
    moments = {"exp_avg": first[start:end], "exp_avg_sq": second[start:end]}
    optimizer.state[weight] = {"step": STEP, **moments}
    return replace(optimizer_shards(optimizer)[weight], start=start, end=end)


def gathered(monkeypatch: pytest.MonkeyPatch, planned: PlannedWeight, shards: list[Shard]) -> Any:
    """Add the sums of several ranks' shards, as a distributed optimizer's data ranks do."""
    parts = [module._ShardSums.of(planned.weight, each) for each in shards]
    sums = [sum(tensors) for tensors in zip(*parts, strict=True)]
    total = module._ShardSums(*sums)
    monkeypatch.setattr(module, "_own_sums", lambda *_: {planned.placement.instance: total})
    weights = {planned.placement.instance: planned}
    return gather_sensitivities(weights, object(), Topology()).get(planned.placement.instance)


@pytest.mark.parametrize("cuts", [[], [8], [3, 9, 10, 17], [1, 2, 3], [23]])
def test_a_separable_second_moment_gives_d_exactly_from_any_ranges(
    monkeypatch: pytest.MonkeyPatch, cuts: list[int]
) -> None:
    planned, first, second = weight_and_moments(separable=True)
    bounds = [0, *cuts, ROWS * COLS]
    shards = [shard(first, second, a, b) for a, b in pairwise(bounds)]
    found = gathered(monkeypatch, planned, shards)
    slope = 0.1 / (1 - 0.9 ** (STEP + 1))
    wanted = slope / (second / (1 - 0.95**STEP)).sqrt().view(ROWS, COLS)
    torch.testing.assert_close(found.row[:, None] * found.col, wanted, rtol=1e-5, atol=0)
    update = first / (1 - 0.9**STEP) / (second / (1 - 0.95**STEP)).sqrt()
    assert found.update_square == pytest.approx(float(update.square().sum()), rel=1e-5)


def test_factors_keep_the_sums_of_rows_and_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    planned, first, second = weight_and_moments(separable=False)
    found = gathered(monkeypatch, planned, [shard(first, second, 0, ROWS * COLS)])
    inverse = 1 / (found.row[:, None] * found.col).square()
    wanted = second.view(ROWS, COLS)
    ratio = inverse.sum(1) / wanted.sum(1)
    torch.testing.assert_close(ratio, ratio[:1].expand(ROWS), rtol=1e-5, atol=0)
    ratio = inverse.sum(0) / wanted.sum(0)
    torch.testing.assert_close(ratio, ratio[:1].expand(COLS), rtol=1e-5, atol=0)


def test_a_weight_without_all_moments_has_no_sensitivity(monkeypatch: pytest.MonkeyPatch) -> None:
    planned, first, second = weight_and_moments(separable=True)
    assert gathered(monkeypatch, planned, [shard(first, second, 0, 20)]) is None
    fresh = replace(shard(first, second, 0, ROWS * COLS), state={})
    assert gathered(monkeypatch, planned, [fresh]) is None

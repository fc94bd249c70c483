"""From observations to the table, on one rank: every column against FP64 NumPy."""

from __future__ import annotations

import pytest
import torch

from megatron_snip.statistics.observation import Observation
from megatron_snip.statistics.pooling import joined_square
from megatron_snip.statistics.records import BASE_COLUMNS, COUPLINGS, FORMAT_COLUMNS, SCALES
from megatron_snip.statistics.reduce import LinearInfo, ReduceInputs, reduce_statistics
from megatron_snip.topology import DataAxis, Placement, Topology
from tests.unit.statistics.toy import EPS, FORMATS, NAME, Toy, errors, row_of


@pytest.mark.parametrize(
    ("kind", "num_chunks", "dtype", "tolerance"),
    [
        ("column", 1, torch.float32, 2e-5),
        ("column", 2, torch.float32, 2e-5),
        ("row", 1, torch.float32, 2e-5),
        # BF16 rounds the probed values by up to a fiftieth of their changes; the noise floor is
        # taken off the squares, not off products of different microbatches.
        ("row", 1, torch.bfloat16, 1e-1),
    ],
)
def test_every_column_is_its_equation(
    kind: str, num_chunks: int, dtype: torch.dtype, tolerance: float
) -> None:
    toy = Toy.make(kind, num_chunks, dtype=dtype)  # type: ignore[arg-type]
    table = toy.observed(Topology())
    wanted = toy.wanted()
    columns = [f"{f}.{c}" for f in FORMATS for c in (*FORMAT_COLUMNS, *COUPLINGS)]
    assert set(wanted) == {*BASE_COLUMNS, *SCALES, *columns}
    found = errors(row_of(table), wanted)
    assert max(found.values()) < tolerance, {k: e for k, e in found.items() if e > tolerance}
    assert (table.step, table.probe_step, table.loss) == (11, EPS, 2.0)
    assert table.linears[0].microbatches == 0  # this rank holds the other linear only


def test_row_and_column_differ_only_in_who_holds_what() -> None:
    column, row = (row_of(Toy.make(kind).observed(Topology())) for kind in ("column", "row"))  # type: ignore[arg-type]
    assert column == pytest.approx(row, rel=1e-6)


def observation(tokens: int, rows: int) -> Observation:
    return Observation(
        microbatch=0,
        rows=torch.arange(rows),
        first=torch.full((1, tokens), 2.0, dtype=torch.float64),
        norms=torch.ones(5, dtype=torch.float64),
        errors=torch.ones((1, 6), dtype=torch.float64),
        output_error=torch.full((1, tokens), 2.0, dtype=torch.float64),
        grad=torch.full((tokens,), 3.0, dtype=torch.float64),
        couplings=torch.tensor([[[3.0, 2.0], [1.0, 6.0], [2.0, 1.0]]], dtype=torch.float64),
        scalings=torch.tensor([[9.0, -5.0], [8.0, 8.0]], dtype=torch.float64),
        sketches=torch.ones((6, 64), dtype=torch.float64),
        wgrad=torch.zeros(64, dtype=torch.float64),
        probe=torch.tensor([11.0, 1.0, 13.0, 2.0], dtype=torch.float64),
    )


def test_experts_count_the_tokens_of_the_whole_batch() -> None:
    """T is the batch's, of which an expert sees a few; its weight's norm comes once a copy."""
    dense = Placement("decoder.layers.0.self_attention.linear_proj", 0, "row", 4, 8)
    experts = [
        Placement("decoder.layers.0.mlp.experts.linear_fc1", 0, "column", 4, 8, expert=e)
        for e in (2, 3)
    ]
    topology = Topology(data=DataAxis(1, 2), expert_data=DataAxis(0, 1))
    observations = {
        dense.instance: [observation(10, 5)],
        experts[0].instance: [observation(4, 2)],
        experts[1].instance: [observation(0, 0)],
    }
    placements = {p.instance: p for p in (dense, *experts)}
    inputs = ReduceInputs(
        step=0,
        formats=("fp8",),
        linears=(LinearInfo.of(dense), LinearInfo.of(experts[0])),
        placements=placements,
        observations=observations,
        update_square=dict.fromkeys(placements, 0.25),
        eps=0.5,
        grad_scale=0.1,
        num_microbatches=1,
        loss_sum=0.0,
        loss_count=0,
    )
    table = reduce_statistics(inputs, topology)
    assert table.loss is None
    first, second = table.linears
    scale, batch_tokens = 0.1**2, 10 * 1 * 2
    assert first.formats["fp8"].fisher == pytest.approx(0.5 * 10 * 6 * scale * batch_tokens / 8)
    assert second.formats["fp8"].fisher == pytest.approx(0.5 * 4 * 6 * scale * batch_tokens / 8)
    # 5 of 10 tokens sampled: twice their sum, over eps^2.
    assert first.probe_input_square == pytest.approx(11 * 2 / 0.25)
    assert first.probe_input_noise == pytest.approx(1 * 2 / 0.25)
    assert first.probe_grad_square == pytest.approx(13 * 2 / 0.25 * scale)
    assert first.probe_grad_noise == pytest.approx(2 * 2 / 0.25 * scale)
    # Couplings stand for all tokens already.
    assert first.formats["fp8"].forward_channel_square == pytest.approx(5 / 0.25 * scale)
    assert first.scale_square == pytest.approx(4 / 0.25 * scale)
    assert first.scale_channel_square == pytest.approx(16 / 0.25 * scale)
    # The output's error has the part 1 / 1 along it; alone of its kind, nothing to pool with.
    assert first.formats["fp8"].forward_scale_square == pytest.approx(4 / 0.25 * scale)
    assert first.formats["fp8"].forward_whole_square == pytest.approx(3 / 0.25 * scale)
    # Half of the tokens of one microbatch: what that adds to the variance of one sample.
    variance = 2 * (2.0 * 2) ** 2 * 0.5 / 0.75
    joined = joined_square(3.0, variance, 9.0, 1)
    assert first.formats["fp8"].forward_square == pytest.approx(joined / 0.25 * scale)
    assert first.formats["fp8"].backward_square == pytest.approx(7 / 0.25 * scale)
    aligned = 0.5 * 10 * 2**2 * scale * batch_tokens
    assert first.formats["fp8"].aligned_fisher == pytest.approx(aligned)
    assert first.update_square == 0.0  # data rank 0 speaks for dense weights
    assert second.update_square == pytest.approx(0.5)
    assert (second.microbatches, second.tokens) == (2, 4)


def test_what_microbatches_share_is_pooled_over_a_kind_but_for_the_whole() -> None:
    """Two layers, two microbatches each, of which those of layer 0 alone have all in common."""
    places = [Placement(f"decoder.layers.{i}.mlp.linear_fc2", 0, "row", 4, 8) for i in (0, 1)]
    seen = {p.instance: [observation(10, 10), observation(10, 10)] for p in places}
    for o in seen[places[1].instance]:
        o.sketches = torch.zeros_like(o.sketches)
    inputs = ReduceInputs(
        step=0,
        formats=("fp8",),
        linears=tuple(LinearInfo.of(p) for p in places),
        placements={p.instance: p for p in places},
        observations=seen,
        update_square={p.instance: 1.0 for p in places},
        eps=1.0,
        grad_scale=1.0,
        num_microbatches=2,
        loss_sum=0.0,
        loss_count=0,
    )
    one, other = (s.formats["fp8"] for s in reduce_statistics(inputs, Topology()).linears)
    common = 2 * 64.0  # |2 z|^2 - 2 |z|^2 of z = (1, ..., 1)
    assert other.forward_whole_square == pytest.approx(2 * 3.0)
    assert one.forward_whole_square == pytest.approx(2 * 3.0 + common)
    apart = 2 * 5.0
    ratio = min(common / apart, 2 * 2.0) / 2  # the mean of the two layers', bounded by 2 M
    assert other.forward_channel_square == pytest.approx(apart * (1 + 3 * ratio / 4))
    assert one.forward_channel_square == pytest.approx(apart + (common + 3 * ratio * apart) / 4)


def test_the_toy_is_where_the_tests_say() -> None:
    assert Toy.make().placement(Topology()).name == NAME

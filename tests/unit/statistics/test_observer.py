"""What an observed iteration measures, of which sample, and that observing changes nothing."""

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_snip.collectives import RemoteFailure
from megatron_snip.formats import DELAYED, Format
from megatron_snip.quantizers.stochastic import ColumnMap
from megatron_snip.statistics import measure
from megatron_snip.statistics import observer as observer_module
from megatron_snip.statistics.observer import StepObserver
from megatron_snip.statistics.sample import (
    MOST_MICROBATCHES,
    MeasureSettings,
    draw_sample,
    draw_weight_rows,
    is_measured,
    rows_of,
)
from megatron_snip.topology import Axis, Placement, Topology
from megatron_snip.types import Operand
from tests.unit.statistics.equations import FORMATS, NAME, SEED, STEP, Toy, largest_error, row_of
from tests.unit.statistics.health_definitions import check_health

ALL = MeasureSettings(FORMATS, STEP, SEED, all_tokens=True)


@pytest.mark.parametrize(("kind", "grad_scale"), [("column", 1.0), ("row", 0.125)])
def test_every_column_is_what_its_definition_says(kind: str, grad_scale: float) -> None:
    """Against FP64 NumPy; FP32 products and sums leave 1e-5."""
    toy = Toy.make(kind)
    found = row_of(toy.observed(Topology(), grad_scale=grad_scale))
    assert largest_error(found, toy.wanted(grad_scale)) < 2e-5
    assert toy.health is not None
    (health,) = toy.health.to_dict()["linears"]
    check_health(health, toy, grad_scale)


def test_a_sample_is_without_bias() -> None:
    """Mean over 60 samples against that over 6 rounds of all tokens, to 4 standard errors.

    Both scatter: stochastic rounding draws anew in each step.
    """
    toy = Toy.make("column", microbatches=1, tokens=2048)

    def rows(steps: int, all_tokens: bool) -> list[dict[str, float]]:
        settings = [
            MeasureSettings(FORMATS, step, SEED, all_tokens=all_tokens) for step in range(steps)
        ]
        return [row_of(toy.observed(Topology(), each)) for each in settings]

    samples, complete = rows(60, False), rows(6, True)
    for key in samples[0]:
        found, wanted = (
            torch.tensor([row[key] for row in each], dtype=torch.float64)
            for each in (samples, complete)
        )
        variance = found.var() / len(found) + wanted.var() / len(wanted)
        mean = wanted.mean()
        assert abs(found.mean() - mean) <= 4 * variance**0.5 + 2e-3 * abs(mean), key
    assert all(row["tokens"] == 2048 for row in samples)


def test_the_first_microbatches_stand_for_a_batch_of_many() -> None:
    """Sums over the others, which have NaN, are estimated; numbers of microbatches are not."""
    toy = Toy.make("column", microbatches=MOST_MICROBATCHES + 8, tokens=16)
    for x in toy.inputs[MOST_MICROBATCHES:]:
        x.fill_(torch.nan)
    settings = MeasureSettings(FORMATS, STEP, SEED)
    found = row_of(toy.observed(Topology(), settings))
    alone = replace(toy, inputs=toy.inputs[:MOST_MICROBATCHES])
    alone.grads = alone.grads[:MOST_MICROBATCHES]
    of_first = row_of(alone.observed(Topology(), settings))
    for name, value in found.items():
        column = name.rpartition(".")[2]
        expansion = (MOST_MICROBATCHES + 8) / MOST_MICROBATCHES
        if column in ("weight_square", "weight_error_square"):
            expansion = 1.0
        assert value == pytest.approx(expansion * of_first[name], rel=1e-12), name
    assert (found["microbatches"], found["tokens"]) == (40, 40 * 16)


@pytest.mark.parametrize("context", [1, 2])
@pytest.mark.parametrize("data_ranks", [1, 2, 3, 31, 32, 33, 256])
def test_every_layout_measures_the_same_microbatches(data_ranks: int, context: int) -> None:
    settings = MeasureSettings(FORMATS, STEP, SEED)
    topology = Topology(data=Axis(0, data_ranks * context), context=context)
    for parts in (1, 2, 4):  # ranks of an expert's weight, for each data rank
        num_ranks = data_ranks * context * parts
        measured = [
            microbatch
            for microbatch in range(40 * num_ranks)
            if is_measured(settings, topology, microbatch, num_ranks)
        ]
        assert measured == list(range(MOST_MICROBATCHES * context * parts))


@pytest.mark.parametrize("data_ranks", [1, 2, 3, 16, 32, 64])
def test_of_a_repeated_layer_complete_microbatches_are_measured(data_ranks: int) -> None:
    """Two calls in each microbatch, as of multi-token prediction; X of the second is larger."""
    settings = MeasureSettings({"fp8": FORMATS["fp8"]}, STEP, SEED)
    place = Placement("mtp.layers.0.mlp.linear_fc1", 0, "column", 128, 64, num_calls=2)
    x, w = torch.ones(8, 128), torch.ones(64, 128, requires_grad=True)
    num_measuring = 0
    for rank in range(data_ranks):
        observer = StepObserver(settings, Topology(data=Axis(rank, data_ranks)))
        for _ in range(192 // data_ranks):
            for size in (1.0, 3.0):
                output = torch.nn.functional.linear(size * x, w)
                observer.observe(place, size * x, w, output).sum().backward()
        (row,) = observer.table([place.info], 1.0, None)[0].linears
        if row.microbatches:
            assert (row.microbatches, row.tokens) == (192 / data_ranks, 192 / data_ranks * 16)
            assert row.input_square == pytest.approx(row.tokens * 128 * 5)  # (1 + 9) / 2
            num_measuring += 1
    assert num_measuring == min(data_ranks, MOST_MICROBATCHES)


def test_thirds_of_a_microbatch_add_up_to_whole_ones() -> None:
    settings = MeasureSettings({"fp8": FORMATS["fp8"]}, STEP, SEED)
    place = Placement("mtp.layers.0.mlp.linear_fc1", 0, "column", 128, 64, num_calls=3)
    x, w = torch.ones(8, 128), torch.ones(64, 128, requires_grad=True)
    observer = StepObserver(settings, Topology())
    for _ in range(3 * 128):
        output = torch.nn.functional.linear(x, w)
        observer.observe(place, x, w, output).sum().backward()
    (row,) = observer.table([place.info], 1.0, None)[0].linears
    assert (row.microbatches, row.tokens) == (128, 3 * 128 * 8)


def test_counting_is_a_part_of_what_measuring_costs() -> None:
    settings = MeasureSettings(FORMATS, STEP, SEED, names=frozenset())
    observer = StepObserver(settings, Topology())
    x, w = torch.ones(8, 128), torch.ones(64, 128, requires_grad=True)
    place = Placement("decoder.layers.0.mlp.linear_fc1", 0, "column", 128, 64)
    output = observer.observe(place, x, w, torch.nn.functional.linear(x, w))
    assert observer.seconds == 0
    output.sum().backward()
    assert observer.seconds > 0


def test_microbatches_of_any_length_count_once() -> None:
    toy = Toy.make("column", microbatches=MOST_MICROBATCHES + 8, tokens=64)
    for i in range(MOST_MICROBATCHES, MOST_MICROBATCHES + 8):
        toy.inputs[i] = toy.inputs[i].repeat(10, 1)
        toy.grads[i] = toy.grads[i].repeat(10, 1)
    row = row_of(toy.observed(Topology(), MeasureSettings(FORMATS, STEP, SEED)))
    assert (row["microbatches"], row["tokens"]) == (40, 64 * (32 + 80))


@pytest.mark.parametrize("names", [None, frozenset()])
def test_a_forward_counts_if_a_backward_reaches_it(names: frozenset[str] | None) -> None:
    """A checkpoint without reentrant autograd runs two forwards with gradients, one backward."""
    settings = MeasureSettings(FORMATS, STEP, SEED, names)
    observer = StepObserver(settings, Topology())
    x, w = torch.randn(64, 128), torch.randn(32, 128, requires_grad=True)
    wanted = 0.0
    for _ in range(2):
        output = checkpoint(linear_with_tap, observer, x, w, use_reentrant=False)
        output.sum().backward()
        wanted += float(x.square().sum())
    linear_with_tap(observer, x, w)  # nothing depends on it
    info = Placement(NAME, 0, "column", 128, 32).info
    (row,) = observer.table([info], 1.0, None)[0].linears
    if names is None:
        assert (row.microbatches, row.tokens) == (2, 128)
        assert row.input_square == pytest.approx(wanted)
    else:
        assert (row.microbatches, row.tokens, row.input_square) == (0, 0, 0)


def test_a_rank_whose_microbatch_is_not_measured_only_counts_its_tokens() -> None:
    settings = MeasureSettings({"fp8": DELAYED}, STEP, SEED)
    observer = StepObserver(settings, Topology(data=Axis(50, 64)))
    place = Placement(NAME, 0, "column", 128, 64)
    x, w = torch.randn(32, 128), torch.randn(64, 128, requires_grad=True)
    asked: list[Format] = []

    def delayed_scales(fmt: Format) -> torch.Tensor:
        asked.append(fmt)
        return torch.ones(3)

    for _ in range(2):
        output = torch.nn.functional.linear(x, w)
        observer.observe(place, x, w, output, delayed_scales=delayed_scales).sum().backward()
    (row,) = observer.table([place.info], 1.0, None)[0].linears
    assert (row.microbatches, row.tokens, row.input_square) == (0.0, 0.0, 0.0)
    # Other ranks measure their first forward, and what gives scales may communicate.
    assert asked == [DELAYED, DELAYED]


def test_experts_without_tokens_while_they_are_measured_count_as_not_measured() -> None:
    observer = StepObserver(MeasureSettings(FORMATS, STEP, SEED), Topology())
    place = Placement("decoder.layers.0.mlp.experts.linear_fc1", 0, "column", 128, 64, expert=0)
    w = torch.randn(64, 128, requires_grad=True)
    for i in range(MOST_MICROBATCHES + 1):
        rows = torch.randn(8 if i == MOST_MICROBATCHES else 0, 128)
        output = torch.nn.functional.linear(rows, w)
        observer.observe(place, rows, w, output).sum().backward()
    (row,) = observer.table([place.info], 1.0, None)[0].linears
    assert (row.microbatches, row.tokens, row.input_square) == (0, 0, 0)


def linear_with_tap(observer: StepObserver, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    place = Placement(NAME, 0, "column", x.shape[1], w.shape[0])
    return observer.observe(place, x, w, torch.nn.functional.linear(x, w))


def gradients(run: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(2)
    x = torch.randn(256, 128, generator=g).requires_grad_()
    w = torch.randn(128, 128, generator=g).requires_grad_()
    loss = run(x, w).square().mean()
    loss.backward()
    assert x.grad is not None and w.grad is not None
    return loss.detach(), x.grad, w.grad


@pytest.mark.parametrize("recompute", [False, True])
def test_observing_changes_no_bit_and_recompute_is_counted_once(recompute: bool) -> None:
    observer = StepObserver(ALL, Topology())

    def run(x: torch.Tensor, w: torch.Tensor) -> Any:
        if not recompute:
            return linear_with_tap(observer, x, w)
        return checkpoint(lambda x, w: linear_with_tap(observer, x, w), x, w, use_reentrant=True)

    before = torch.get_rng_state()
    observed = gradients(run)
    plain = gradients(torch.nn.functional.linear)
    assert all(torch.equal(a, b) for a, b in zip(observed, plain, strict=True))
    assert torch.equal(torch.get_rng_state(), before)
    with torch.no_grad():  # an evaluation
        linear_with_tap(observer, torch.randn(8, 128), torch.randn(128, 128))
    info = Placement(NAME, 0, "column", 128, 128).info
    row = observer.table([info], 1.0, None)[0].linears[0]
    assert (row.microbatches, row.tokens) == (1.0, 256.0)
    nothing = StepObserver(MeasureSettings(FORMATS, 0, 0, frozenset()), Topology())
    gradients(lambda x, w: linear_with_tap(nothing, x, w))  # linears that are not asked for
    (row,) = nothing.table([info], 1.0, None)[0].linears
    assert row.microbatches == 0.0 and row.formats["fp4"].input_error_square == 0.0


@pytest.mark.parametrize(
    ("place", "error"),
    [("rows_of", RuntimeError("a bug")), ("operand_sums", torch.OutOfMemoryError("no memory"))],
)
def test_a_tap_that_fails_leaves_the_backward_alone(
    monkeypatch: pytest.MonkeyPatch, error: Exception, place: str
) -> None:
    real = getattr(observer_module, place)
    calls = 0

    def fail(*args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise error
        return real(*args, **named)

    monkeypatch.setattr(observer_module, place, fail)
    observer = StepObserver(ALL, Topology())
    observed = gradients(lambda x, w: linear_with_tap(observer, x, w))
    plain = gradients(torch.nn.functional.linear)
    assert all(torch.equal(a, b) for a, b in zip(observed, plain, strict=True))
    info = Placement(NAME, 0, "column", 128, 128).info
    wanted = f"measuring failed on rank 0: {NAME}: {type(error).__name__}: {error}"
    with pytest.raises(RemoteFailure, match=wanted):
        observer.table([info], 1.0, None)


@pytest.mark.parametrize("tokens", [0, 1, 130])
def test_experts_with_few_tokens_or_none(tokens: int) -> None:
    observer = StepObserver(MeasureSettings(FORMATS, 0, 0), Topology())
    w = torch.randn(64, 128, requires_grad=True)
    linear_with_tap(observer, torch.randn(tokens, 128), w).sum().backward()
    info = Placement(NAME, 0, "column", 128, 64).info
    (row,) = observer.table([info], 1.0, None)[0].linears
    assert row.tokens == tokens and row.microbatches == 1.0
    assert (row.formats["fp4"].input_error_square > 0) == (tokens > 0)
    assert row.formats["fp4"].weight_error_square > 0


def test_tokens_of_several_senders_are_measured_as_microbatches_of_their_own() -> None:
    """Rows that came mixed give what each sender's rows give alone."""
    toy = Toy.make("column", microbatches=2)
    x, g = torch.cat(toy.inputs), torch.cat(toy.grads)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    place_of = order.argsort()
    parts = {0: place_of[:128], 1: place_of[128:]}
    topology = Topology(data=Axis(0, 2))
    place = Placement(NAME, 0, "column", 256, 512, expert=3)
    observer = StepObserver(ALL, topology, lambda placement, rows: parts)
    weight = toy.weight.clone().requires_grad_()
    mixed = x[order]
    tapped = observer.observe(place, mixed, weight, torch.nn.functional.linear(mixed, weight))
    tapped.backward(g[order])
    (row,) = observer.table([place.info], 1.0, None)[0].linears
    wanted = toy.wanted()
    assert (row.microbatches, row.tokens) == (2.0, 256.0)
    found = row.formats["fp4"]
    assert found.input_error_square == pytest.approx(wanted["fp4.input_error_square"], rel=1e-5)
    # Stochastic rounding draws by expert, the reference by dense linear.
    assert found.grad_error_square == pytest.approx(wanted["fp4.grad_error_square"], rel=0.03)


def test_a_weight_is_measured_once_for_all_senders_and_microbatches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the sums are bit for bit those of a call of the linear for each sender."""
    toy = Toy.make("column", microbatches=3)
    place = replace(toy.placement(Topology()), expert=3)
    real = measure.prepare
    calls: Counter[Operand] = Counter()

    def counted(x: torch.Tensor, fmt: Format, operand: Operand, *args: Any) -> Any:
        calls[operand] += 1
        return real(x, fmt, operand, *args)

    monkeypatch.setattr(measure, "prepare", counted)

    def observed(xs: Any, gs: Any, topology: Topology, parts: Any) -> Any:
        observer = StepObserver(ALL, topology, lambda placement, rows: parts)
        weight = toy.weight.bfloat16().requires_grad_()
        for x, g in zip(xs, gs, strict=True):
            output = torch.nn.functional.linear(x.bfloat16(), weight)
            observer.observe(place, x.bfloat16(), weight, output).backward(g.bfloat16())
        statistics, health = observer.table([place.info], 1.0, None)
        return statistics.to_dict(), health.to_dict()  # NaN is None there

    parts = dict(enumerate(torch.arange(3 * 128).split(128)))
    together = observed(
        [torch.cat(toy.inputs)], [torch.cat(toy.grads)], Topology(data=Axis(0, 3)), parts
    )
    number = len(FORMATS)
    once = {Operand.WEIGHT: number, Operand.INPUT: 3 * number, Operand.GRAD_OUTPUT: 3 * number}
    assert calls == once
    calls.clear()
    assert together == observed(toy.inputs, toy.grads, Topology(), None)
    assert calls == once


@pytest.mark.parametrize(("cols", "chunks"), [(2048, 1), (2048, 2), (516, 1), (264, 2), (96, 1)])
@pytest.mark.parametrize("world_size", [2, 4])
def test_shards_measure_the_rows_of_the_complete_weight(
    cols: int, chunks: int, world_size: int
) -> None:
    settings = MeasureSettings(FORMATS, 7, 1)

    def measured(size: int) -> tuple[list[int], set[int]]:
        maps = [ColumnMap.shard(cols // size, rank, size, chunks) for rank in range(size)]
        found = [draw_weight_rows(settings, each) for each in maps]
        every = torch.arange(cols // size)
        own = [
            each.columns(every if rows.own is None else rows.own)
            for each, rows in zip(maps, found, strict=True)
        ]
        return sorted(torch.cat(own).tolist()), {rows.num_rows for rows in found}

    rows, numbers = measured(1)
    assert measured(world_size) == (rows, numbers) and numbers == {len(rows)}
    tiles = {row // 128 for row in rows}
    assert len(tiles) == -(-cols // 128 // 4) or cols < 128
    # Tiles are complete.
    assert rows == [row for row in range(cols) if row // 128 in tiles]


def test_the_rows_of_a_weight_change_with_the_iteration() -> None:
    columns = ColumnMap(2048, 2048, 2048, 0)
    drawn = [draw_weight_rows(MeasureSettings(FORMATS, i, 1), columns).own for i in range(20)]
    seen = torch.cat([rows for rows in drawn if rows is not None]).unique()
    assert len(seen) == 2048
    assert draw_weight_rows(ALL, columns).own is None


@pytest.mark.parametrize("kind", ["column", "row"])
def test_a_quarter_of_the_rows_gives_the_error_of_a_weight(kind: Any) -> None:
    """Rows as those of queries, keys and values: the size of a row differs by 16 between tiles.

    |W|^2 is of all rows, and so exact; the relative error is of the sampled ones.
    """
    toy = Toy.make(kind, microbatches=1)
    generator = torch.Generator().manual_seed(2)
    toy.weight = torch.randn(2048, 256, generator=generator)
    toy.weight *= torch.tensor([4.0, 1.0, 0.25, 1.0]).repeat_interleave(128).repeat(4)[:, None]
    toy.grads = [torch.randn(128, 2048, generator=generator)]
    wanted = row_of(toy.observed(Topology()))
    for step in range(8):
        found = row_of(toy.observed(Topology(), MeasureSettings(FORMATS, step, SEED)))
        assert found["weight_square"] == wanted["weight_square"]
        for name in ("fp8.weight_error_square", "fp4.weight_error_square"):
            assert found[name] == pytest.approx(wanted[name], rel=0.1)


def test_a_weight_of_zeros_has_no_error_and_one_of_which_zeros_were_drawn_has_nan() -> None:
    """An error that is not known must not make low precision free."""
    toy = Toy.make("column", microbatches=1)
    settings = MeasureSettings(FORMATS, STEP, SEED)
    toy.weight.zero_()
    row = row_of(toy.observed(Topology(), settings))
    assert (row["weight_square"], row["fp4.weight_error_square"]) == (0.0, 0.0)
    drawn = draw_weight_rows(settings, ColumnMap(512, 512, 512, 0)).own
    assert drawn is not None and len(drawn) == 128
    toy.weight.fill_(1.0)
    toy.weight[drawn] = 0.0
    row = row_of(toy.observed(Topology(), settings))
    assert row["weight_square"] == pytest.approx(3 * 128 * 256)
    assert math.isnan(row["fp4.weight_error_square"])


@pytest.mark.parametrize("all_tokens", [False, True])
def test_a_rank_stores_each_of_its_own_sampled_rows_and_no_others(all_tokens: bool) -> None:
    """Split over four ranks; the sum of what they complete is the sample."""
    settings = MeasureSettings(FORMATS, 7, 1, all_tokens=all_tokens)
    sample = draw_sample(settings, 1200, 0)
    x = torch.randn(1200, 8)
    parts = [
        rows_of(part, sample.rows, True, Axis(rank, 4)) for rank, part in enumerate(x.chunk(4))
    ]
    assert sum(len(part.values) for part in parts) == len(sample.rows)
    assert len(sample.rows) == (1200 if all_tokens else 1200 // 16)
    assert torch.equal(sum(part.with_zeros() for part in parts), x[sample.rows.indices])


def test_the_forward_stores_the_rows_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under sequence parallelism."""
    kept: list[tuple[torch.Size, int]] = []

    def rows(matrix: torch.Tensor, *args: Any) -> Any:
        own = rows_of(matrix, *args)
        kept.append((own.values.shape, own.values.untyped_storage().nbytes()))
        return own

    monkeypatch.setattr(observer_module, "rows_of", rows)
    observer = StepObserver(MeasureSettings(FORMATS, 7, 1), Topology())
    place = Placement(NAME, 0, "column", 128, 64, Axis(1, 4))
    x, w = torch.randn(300, 128), torch.randn(16, 128, requires_grad=True)
    output = torch.nn.functional.linear(torch.randn(1200, 128), w)
    observer.observe(place, x, w, output, input_is_split=True)
    sampled = draw_sample(MeasureSettings(FORMATS, 7, 1), 1200, 0).rows.indices
    count = int(((sampled >= 300) & (sampled < 600)).sum())
    assert kept == [(torch.Size((count, 128)), count * 128 * 4)]
    assert 0 < count < len(sampled)

"""Couplings of a sample by hand: term by term, of groups, probes, and shards on two ranks."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_snip.formats import FORMATS
from megatron_snip.statistics import coupling
from megatron_snip.statistics.coupling import couple
from megatron_snip.statistics.observation import Observation, ProbedRows, SampledRows
from megatron_snip.statistics.recorder import MeasureSettings
from megatron_snip.statistics.sketch import SketchSigns
from megatron_snip.topology import LinearKind, Placement, TensorAxis
from tests.unit.statistics.equations import dequantized
from tests.unit.statistics.test_coupling import SIGNS, seen

K, N = 256, 512
TWO = MeasureSettings(("fp8", "mxfp4"), step=2, seed=7, num_rows=1)
"""One whose weight is quantized once, and one that dgrad quantizes along the other dimension."""


def compared(tokens: int, rows: int, dtype: torch.dtype, common: bool = False) -> Observation:
    """What both passes saw; of `common`, the rows of X and of G are one row up to its sign."""
    generator = torch.Generator().manual_seed(rows)

    def draw(width: int) -> tuple[torch.Tensor, torch.Tensor]:
        count = 1 if common else rows
        spread = torch.rand(width, generator=generator) + 0.1
        old = torch.randn(count, width, generator=generator) * spread
        old = (old * torch.randn(rows, 1, generator=generator).sign()).to(dtype)
        old[:, 3] = 0.0  # a feature that is not there is no noise, either
        # By a few units in the last place of BF16.
        change = old.float() * torch.randn(rows, width, generator=generator) / 64
        return old, (old.float() + change).to(dtype)

    (x, x_probe), (g, g_probe) = draw(K), draw(N)

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.float64)

    return replace(
        seen(),
        rows=torch.arange(rows),
        grad=zeros(tokens),
        couplings=zeros(2, 3, 2),
        scalings=zeros(2, 2),
        sketches=zeros(10, 64),
        probe=zeros(4),
        sampled=SampledRows(x, g),
        probed=ProbedRows(x_probe, g_probe),
    )


def weights(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(9)).to(dtype)


def ulp_variance(old: torch.Tensor) -> torch.Tensor:
    """Of the difference of two values of BF16 (7 bits of mantissa stored), by their rounding."""
    exponent = torch.floor(torch.log2(old.double().abs()))
    return torch.where(old == 0, 0.0, 2.0 ** (2 * (exponent - 7)) / 6)


def by_pairs(terms: torch.Tensor, noise: torch.Tensor | float, tokens: int) -> tuple[float, float]:
    """Products of a token with itself, less noise, and of two different ones; of all tokens."""
    sampled, own = len(terms), float(terms.square().sum())
    others = float(terms.sum(0).square().sum()) - own
    pairs = tokens * (tokens - 1) / (sampled * (sampled - 1))
    return (own - float(torch.as_tensor(noise).sum())) * tokens / sampled, others * pairs


@pytest.mark.parametrize("tokens", [4, 10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("f", "name"), enumerate(TWO.formats))
def test_four_tokens_give_their_terms_one_by_one(
    f: int, name: str, dtype: torch.dtype, tokens: int
) -> None:
    """Each is a group of its own: sums over groups must be the equations, token by token."""
    placement, w32 = Placement("l", 0, "row", K, N), weights(dtype)
    o = compared(tokens, 4, dtype, common=True)  # then a channel's noise is the same share of all
    assert o.sampled is not None
    assert o.probed is not None
    x, g, w = o.sampled.input.double(), o.sampled.grad.double(), w32.double()
    d_x, d_g = o.probed.input.double() - x, o.probed.grad.double() - g
    _, grad_error = coupling._row_errors(placement, o, TWO, f)
    assert couple(placement, w32, [o], TWO, SIGNS) is None
    noisy = float(dtype == torch.bfloat16)
    x_noise, g_noise = ulp_variance(x) * noisy, ulp_variance(g) * noisy

    def found(parts: torch.Tensor) -> list[float]:
        return parts.tolist() if apart else [float(parts.sum())]

    def sums_of(*pieces: tuple[float, float]) -> list[float]:
        both = [sum(each) for each in zip(*pieces, strict=True)]
        return both if apart else [sum(both)]

    apart = tokens > 4 or noisy  # else nobody needs the two parts told apart
    rows, cols = FORMATS[name].weight_block
    w_f, w_d = (
        torch.from_numpy(dequantized(w32.float().numpy(), name, block)) - w
        for block in ((rows, cols), (cols, rows))
    )
    x_q = torch.from_numpy(dequantized(x.float().numpy(), name, (1, FORMATS[name].tile))) - x
    by_w, by_x = x @ w_f.T, (d_g @ w) * x_q
    pieces = by_pairs(d_g * by_w, g_noise * by_w**2, tokens), by_pairs(by_x, 0.0, tokens)
    assert found(o.couplings[f, 0]) == pytest.approx(sums_of(*pieces), rel=1e-3)
    by_w, by_g = g @ w_d, (d_x @ w.T) * grad_error.double()
    pieces = by_pairs(d_x * by_w, x_noise * by_w**2, tokens), by_pairs(by_g, 0.0, tokens)
    assert found(o.couplings[f, 1]) == pytest.approx(sums_of(*pieces), rel=1e-3)
    y = x @ w.T
    pieces = by_pairs(d_g * y, g_noise * y**2, tokens), (0.0, 0.0)
    assert found(o.scalings[1]) == pytest.approx(sums_of(*pieces), rel=1e-3)
    whole = ((d_g * (x @ w_f.T)).sum(1) + by_x.sum(1))[:, None]
    if not noisy:
        parts = sums_of(by_pairs(whole, 0.0, tokens))
        size = max(map(abs, parts))
        assert found(o.couplings[f, 2]) == pytest.approx(parts, abs=1e-3 * size)


def test_probes_count_for_their_share() -> None:
    placement, settings = Placement("l", 0, "row", K, N), replace(TWO, num_probes=4)
    one, quarter, other = (compared(20, 10, torch.float32) for _ in range(3))
    assert couple(placement, weights(), [one], TWO, SIGNS) is None
    assert couple(placement, weights(), [quarter], settings, SIGNS) is None
    assert couple(placement, weights(), [other], TWO, SIGNS, draw=1) is None
    torch.testing.assert_close(quarter.couplings, one.couplings / 4)
    torch.testing.assert_close(quarter.scalings, one.scalings / 4)
    torch.testing.assert_close(quarter.sketches, one.sketches / 2)
    torch.testing.assert_close(other.couplings, one.couplings)
    assert not torch.allclose(other.sketches[:2], one.sketches[:2])  # signs of another draw


class TwoRanks:
    """A tensor axis of two ranks that are threads, in the place of `sum_over`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: dict[int, list[int]] = {0: [], 1: []}
        self._barrier = threading.Barrier(2, timeout=20)
        self._given: dict[int, torch.Tensor] = {}
        self._rank = threading.local()
        monkeypatch.setattr(coupling, "sum_over", self._sum)

    def couple(
        self, kind: LinearKind, chunks: int, shards: list[list[Observation]]
    ) -> list[str | None]:
        """Couple both ranks' observations; return what they say."""

        def one(rank: int) -> str | None:
            self._rank.index = rank
            axis: Any = TensorAxis(rank, 2, object())  # type: ignore[arg-type]
            placement = Placement("l", 0, kind, K, N, axis, chunks)
            dim = 0 if kind == "column" else 1
            w = shard(weights(torch.bfloat16), dim, chunks, rank)
            return couple(placement, w, shards[rank], TWO, SketchSigns(0, 0))

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(one, (0, 1)))

    def _sum(self, tensor: torch.Tensor, _: object) -> torch.Tensor:
        rank = self._rank.index
        self.sizes[rank].append(tensor.numel())
        self._given[rank] = tensor.clone()
        self._barrier.wait()
        total = self._given[0] + self._given[1]
        self._barrier.wait()
        return tensor.copy_(total)


def shard(whole: torch.Tensor, dim: int, chunks: int, rank: int) -> torch.Tensor:
    parts = [chunk.chunk(2, dim)[rank] for chunk in whole.chunk(chunks, dim)]
    return torch.cat(parts, dim).clone()


def sharded(o: Observation, kind: LinearKind, chunks: int, rank: int) -> Observation:
    """What one of two ranks sees of an observation that nobody has coupled yet."""
    assert o.sampled is not None
    assert o.probed is not None
    if kind == "column":
        g = (shard(t, 1, chunks, rank) for t in (o.sampled.grad, o.probed.grad))
        x = (t for t in (o.sampled.input, o.probed.input))
    else:
        g = (t for t in (o.sampled.grad, o.probed.grad))
        x = (shard(t, 1, 1, rank) for t in (o.sampled.input, o.probed.input))
    return replace(
        o,
        **{key: torch.zeros_like(getattr(o, key)) for key in COUPLED},
        sampled=SampledRows(next(x), next(g)),
        probed=ProbedRows(next(x), next(g)),
    )


COUPLED = ("couplings", "scalings", "sketches", "probe")


@pytest.mark.parametrize(("kind", "chunks"), [("column", 1), ("column", 2), ("row", 1)])
def test_two_ranks_find_what_one_does_in_bf16(
    monkeypatch: pytest.MonkeyPatch, kind: LinearKind, chunks: int
) -> None:
    """Groups of unequal size, and all tokens, of which noise comes off, too."""
    whole = [compared(20, 10, torch.bfloat16), compared(7, 7, torch.bfloat16)]
    shards = [[sharded(o, kind, chunks, rank) for o in whole] for rank in (0, 1)]
    ranks = TwoRanks(monkeypatch)
    assert ranks.couple(kind, chunks, shards) == [None, None]
    assert ranks.sizes[0] == ranks.sizes[1]
    assert len(ranks.sizes[0]) == 1
    placement = Placement("l", 0, kind, K, N)
    assert couple(placement, weights(torch.bfloat16), whole, TWO, SketchSigns(0, 0)) is None
    for o, *parts in zip(whole, *shards, strict=True):
        for key in COUPLED:
            wanted, found = getattr(o, key), sum(getattr(part, key) for part in parts)
            atol = 1e-5 * float(wanted.abs().amax())
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=atol, msg=key)


@pytest.mark.parametrize("kind", ["column", "row"])
def test_a_rank_that_fails_exchanges_as_much_as_its_peer(
    monkeypatch: pytest.MonkeyPatch, kind: LinearKind
) -> None:
    whole = [compared(20, 10, torch.bfloat16), compared(7, 3, torch.float32)]
    shards = [[sharded(o, kind, 1, rank) for o in whole] for rank in (0, 1)]
    broken = shards[1][1].probed
    assert broken is not None
    broken.input = broken.input[:, :5]
    ranks = TwoRanks(monkeypatch)
    good, bad = ranks.couple(kind, 1, shards)
    assert good is None
    assert bad is not None
    assert bad.startswith("l: RuntimeError")
    assert ranks.sizes[0] == ranks.sizes[1] != []
    assert all(o.probed is None for seen_by in shards for o in seen_by)


@pytest.mark.parametrize("rows", [10, 20])
def test_off_the_whole_comes_the_noise_of_all_channels(
    monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """Rounding is independent from channel to channel; a channel without any signal has a say."""
    placement = Placement("l", 0, "column", K, N)
    found = []
    for signal in (coupling._signal, lambda *_: None):
        o = compared(20, rows, torch.bfloat16)
        assert o.sampled is not None
        assert o.probed is not None
        o.probed.grad[:, 0] = o.sampled.grad[:, 0]
        monkeypatch.setattr(coupling, "_signal", signal)
        assert couple(placement, weights(torch.bfloat16), [o], TWO, SketchSigns(0, 0)) is None
        found.append(torch.cat([o.scalings.sum(-1), o.couplings[0, :, 0]]))
    whole, apart, *_ = taken = found[1] - found[0]
    assert whole > 0
    assert whole == pytest.approx(float(apart), rel=1e-9)
    assert taken[4] == pytest.approx(float(taken[2]), rel=1e-9)  # likewise of a format

"""Philox against published vectors; streams depend on key and global index alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_snip.quantizers.stochastic import (
    ColumnMap,
    StochasticStream,
    StreamKey,
    grad_output_stream,
    random_bits16,
)
from megatron_snip.topology import Axis, LinearKind, Placement
from megatron_snip.types import Gemm

KEY = StreamKey(seed=1, linear="decoder.layers.3.mlp.linear_fc1", iteration=7, microbatch=2)
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
PI_KEY = 0xA4093822 | 0x299F31D0 << 32
ONES = (0xFFFFFFFF,) * 4

# The answers that Random123 publishes for philox4x32 with 7 rounds.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), 0, "5f6fb709 0d893f64 4f121f81 4f730a48"),
    (ONES, 2**64 - 1, "5207ddc2 45165e59 4d8ee751 8c52f662"),
    (PI, PI_KEY, "4dfccaba 190a87f0 c47362ba b6b5242a"),
]


def numpy_philox(counter: np.ndarray, key: int) -> np.ndarray:
    """[n, 4] uint32 -> [n, 4] uint32, written from the definition."""
    c = counter.astype(np.uint64).T.copy()
    k = [np.uint64(key & 0xFFFFFFFF), np.uint64(key >> 32)]
    word = np.uint64(0xFFFFFFFF)
    for _ in range(7):
        a, b = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        half = np.uint64(32)
        c = np.stack([(b >> half) ^ c[1] ^ k[0], b & word, (a >> half) ^ c[3] ^ k[1], a & word])
        k = [(k[0] + np.uint64(0x9E3779B9)) & word, (k[1] + np.uint64(0xBB67AE85)) & word]
    return c.T.astype(np.uint32)


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_the_numpy_version_gives_the_published_answers(counter, key, answer):
    words = numpy_philox(np.array([counter], np.uint64), key)[0]
    assert " ".join(f"{word:08x}" for word in words) == answer


@pytest.mark.parametrize("key", [0, 0xDEADBEEF12345678, 2**64 - 1])
def test_lanes_are_the_words_in_order(key):
    rng = np.random.default_rng(0)
    counters = np.concatenate([[0, 1, 7, 2**32 - 1, 2**32], rng.integers(0, 2**62, 500)])
    wide = np.stack([counters & 0xFFFFFFFF, counters >> 32], 1)
    words = numpy_philox(np.concatenate([wide, np.zeros_like(wide)], 1), key)
    halves = np.stack([words & 0xFFFF, words >> 16], 2).reshape(len(counters), 8)
    given = torch.from_numpy(counters)
    assert np.array_equal(random_bits16(given, key).numpy().view(np.uint16), halves)
    assert np.array_equal(given.numpy(), counters)


def test_keys():
    # a change of the hash would silently change every run that is replayed
    assert KEY.word == 0x0FD965DA51BA7842
    changes = ({"seed": 2}, {"linear": "x"}, {"iteration": 8}, {"microbatch": 3})
    plain = draw(KEY, 8, 64)
    for change in changes:
        other = draw(replace(KEY, **change), 8, 64)
        assert (plain == other).float().mean() < 0.02


def draw(key: StreamKey, rows: int, cols: int) -> torch.Tensor:
    return StochasticStream(key).bits16(rows, cols)


@pytest.mark.parametrize("cols", [64, 20, 7])
def test_a_number_depends_on_the_index_in_the_tensor_alone(cols, monkeypatch):
    index = np.arange(9 * cols)
    counters = np.zeros((9 * cols, 4), np.uint32)
    counters[:, 0] = index >> 3
    words = numpy_philox(counters, KEY.word)
    lanes = np.stack([words & 0xFFFF, words >> 16], 2).reshape(-1, 8)
    wanted = lanes[index, index & 7].reshape(9, cols)
    assert np.array_equal(draw(KEY, 9, cols).numpy().view(np.uint16), wanted)
    monkeypatch.setattr("megatron_snip.quantizers.stochastic._COUNTERS", 3)
    assert np.array_equal(draw(KEY, 9, cols).numpy().view(np.uint16), wanted)


@pytest.mark.parametrize("cols", [64, 20])
@pytest.mark.parametrize("draw_first", [True, False])
def test_wgrad_s_copy_takes_swapped_numbers(cols, draw_first):
    stream = StochasticStream(KEY)
    stream = stream.draw(8, cols) if draw_first else stream
    dgrad, wgrad = (stream.for_gemm(g).bits16(8, cols).flatten() for g in (Gemm.DGRAD, Gemm.WGRAD))
    assert torch.equal(dgrad, StochasticStream(KEY).bits16(8, cols).flatten())
    assert torch.equal(wgrad, dgrad[torch.arange(8 * cols) ^ 4])


@pytest.mark.parametrize("cols", [64, 20, 7])
@pytest.mark.parametrize("gemm", [Gemm.DGRAD, Gemm.WGRAD])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_part_of_the_rows_draws_its_part_of_the_tensor(cols, gemm, is_sharded):
    columns = ColumnMap.shard(cols, 1, 2) if is_sharded else None
    full = StochasticStream(KEY, columns).for_gemm(gemm).bits16(9, cols)
    for first, end in ((0, 4), (4, 9)):
        stream = StochasticStream(KEY, columns, first_row=first)
        assert torch.equal(stream.for_gemm(gemm).bits16(end - first, cols), full[first:end])


def grad_bits(kind: LinearKind, axis: Axis, num_chunks: int, features: int) -> torch.Tensor:
    name = "decoder.layers.1.mlp.linear_fc1"
    place = Placement(name, 0, kind, 64, features, axis, num_chunks)
    cols = features // axis.size if kind == "column" else features
    return grad_output_stream(3, place, 5, 2).bits16(5, cols)


@pytest.mark.parametrize("features", [96, 48])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("num_chunks", [1, 2])
def test_tensor_parallel_shards_draw_their_part_of_the_tensor(features, size, num_chunks):
    full = grad_bits("column", Axis(), num_chunks, features)
    for rank in range(size):
        wanted = torch.cat([c.chunk(size, 1)[rank] for c in full.chunk(num_chunks, 1)], 1)
        axis = Axis(rank, size)
        assert torch.equal(grad_bits("column", axis, num_chunks, features), wanted)
        assert torch.equal(grad_bits("row", axis, num_chunks, features), full)
    assert torch.equal(grad_bits("column", Axis(rank=1), num_chunks, features), full)

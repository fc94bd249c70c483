"""Philox against published vectors and against a NumPy version in unsigned arithmetic."""

import numpy as np
import pytest
import torch

from megatron_snip.quantizers.philox import philox4x32, random_bits16

PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
PI_KEY = 0xA4093822 | 0x299F31D0 << 32
ONES = (0xFFFFFFFF,) * 4

# The answers that Random123 publishes for philox4x32.
KNOWN_ANSWERS = [
    (7, (0, 0, 0, 0), 0, "5f6fb709 0d893f64 4f121f81 4f730a48"),
    (7, ONES, 2**64 - 1, "5207ddc2 45165e59 4d8ee751 8c52f662"),
    (7, PI, PI_KEY, "4dfccaba 190a87f0 c47362ba b6b5242a"),
    (10, (0, 0, 0, 0), 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (10, ONES, 2**64 - 1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (10, PI, PI_KEY, "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def numpy_philox(counter: np.ndarray, key: int, num_rounds: int) -> np.ndarray:
    """[n, 4] uint32 -> [n, 4] uint32, written from the definition."""
    c = counter.astype(np.uint64).T.copy()
    k = [np.uint64(key & 0xFFFFFFFF), np.uint64(key >> 32)]
    word = np.uint64(0xFFFFFFFF)
    for _ in range(num_rounds):
        a, b = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        half = np.uint64(32)
        c = np.stack([(b >> half) ^ c[1] ^ k[0], b & word, (a >> half) ^ c[3] ^ k[1], a & word])
        k = [(k[0] + np.uint64(0x9E3779B9)) & word, (k[1] + np.uint64(0xBB67AE85)) & word]
    return c.T.astype(np.uint32)


@pytest.mark.parametrize(("rounds", "counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers(rounds, counter, key, answer):
    words = philox4x32(tuple(torch.tensor([c]) for c in counter), key, rounds)
    assert " ".join(f"{int(word):08x}" for word in words) == answer


def test_against_numpy():
    rng = np.random.default_rng(0)
    counter = rng.integers(0, 2**32, (500, 4), dtype=np.uint64)
    key = int(rng.integers(0, 2**63)) * 2 + 1
    words = philox4x32(tuple(torch.from_numpy(c.astype(np.int64)) for c in counter.T), key)
    assert np.array_equal(torch.stack(words, 1).numpy(), numpy_philox(counter, key, 7))


def test_sixteen_bit_lanes_are_the_words_in_order():
    counters = torch.tensor([0, 1, 7, 2**32 - 1, 2**32, 2**40 + 5])
    key = 0xDEADBEEF12345678
    wide = np.stack([counters.numpy() & 0xFFFFFFFF, counters.numpy() >> 32], 1)
    words = numpy_philox(np.concatenate([wide, np.zeros_like(wide)], 1), key, 7)
    halves = np.stack([words & 0xFFFF, words >> 16], 2).reshape(len(counters), 8)
    assert np.array_equal(random_bits16(counters, key).numpy().view(np.uint16), halves)


def test_counters_are_left_alone():
    counters = torch.arange(10)
    random_bits16(counters, 3)
    assert counters.tolist() == list(range(10))

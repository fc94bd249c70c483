"""Philox4x32: counter-based random numbers, the same on every backend.

A round maps (c0, c1, c2, c3) under the key (k0, k1), all 32-bit words, to

    c0' = hi(B * c2) ^ c1 ^ k0      c1' = lo(B * c2)
    c2' = hi(A * c0) ^ c3 ^ k1      c3' = lo(A * c0)

after which k0 += 0x9E3779B9 and k1 += 0xBB67AE85 (mod 2^32). We run 7 rounds, the fewest that
pass every test of BigCrush. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC'11. The words for counter (lo, hi, 0, 0) are those of `triton.language.randint4x(key, counter,
n_rounds=7)`, so that kernels and this reference draw the same numbers.

One counter serves 8 elements: lane j of a counter is the 16-bit half j % 2 (low half first) of
word j // 2, read as a signed integer.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

NUM_ROUNDS = 7
LANES = 8
"""Elements that share a counter: four 32-bit words of two halves each."""

_MULTIPLIER_A = 0xD2511F53
_MULTIPLIER_B = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_WORD = 0xFFFFFFFF

Words = tuple[Tensor, Tensor, Tensor, Tensor]

assert sys.byteorder == "little", "the lanes of a counter are laid out for little-endian machines"


def philox4x32(counter: Words, key: int, num_rounds: int = NUM_ROUNDS) -> Words:
    """Return four random words for each counter.

    Args:
        counter: c0..c3, int64 tensors of one shape, each in [0, 2^32); left as they are.
        key: 64-bit unsigned; k0 is its low word, k1 its high word.
        num_rounds: how often to mix; 7 in this package, 10 in most published vectors.

    Returns:
        Four int64 tensors of that shape, each in [0, 2^32).
    """
    c0, c1, c2, c3 = (word.clone() for word in counter)
    return _rounds(c0, c1, c2, c3, key, num_rounds)


def _rounds(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, key: int, num_rounds: int) -> Words:
    """Mix in place; c1 and c3 may hold anything above 32 bits."""
    product_a, product_b = torch.empty_like(c0), torch.empty_like(c0)
    key0, key1 = key & _WORD, (key >> 32) & _WORD
    for _ in range(num_rounds):
        # The int64 products wrap, which keeps their 64 bits right. c1 and c3 carry the whole
        # product: what stands above 32 bits falls to the mask after the xor.
        torch.mul(c0, _MULTIPLIER_A, out=product_a)
        torch.mul(c2, _MULTIPLIER_B, out=product_b)
        _mix_(c0, product_b, c1, key0)
        _mix_(c2, product_a, c3, key1)
        c1, c3, product_b, product_a = product_b, product_a, c1, c3
        key0, key1 = (key0 + _WEYL_0) & _WORD, (key1 + _WEYL_1) & _WORD
    return c0, c1.bitwise_and_(_WORD), c2, c3.bitwise_and_(_WORD)


def random_bits16(counters: Tensor, key: int) -> Tensor:
    """Return 8 signed 16-bit random integers for each counter.

    Args:
        counters: [...], int64, non-negative.
        key: 64-bit unsigned, see `StreamKey.word`.

    Returns:
        [..., 8], int16, uniform over all 65536 values.
    """
    # The first round by hand: with c2 = c3 = 0 half of its products vanish.
    key0, key1 = key & _WORD, (key >> 32) & _WORD
    c3 = (counters & _WORD).mul_(_MULTIPLIER_A)
    c2 = (c3 >> 32).bitwise_xor_(key1).bitwise_and_(_WORD)
    c0 = (counters >> 32).bitwise_xor_(key0)
    following = (key0 + _WEYL_0) & _WORD | ((key1 + _WEYL_1) & _WORD) << 32
    zero = torch.zeros_like(c0)
    w0, w1, w2, w3 = _rounds(c0, zero, c2, c3, following, NUM_ROUNDS - 1)
    packed = torch.empty((*counters.shape, 2), dtype=torch.int64, device=counters.device)
    torch.bitwise_or(w0, w1.bitwise_left_shift_(32), out=packed[..., 0])
    torch.bitwise_or(w2, w3.bitwise_left_shift_(32), out=packed[..., 1])
    return packed.view(torch.int16)


def _mix_(word: Tensor, product: Tensor, other: Tensor, key: int) -> None:
    """Set word to (hi(product) ^ other ^ key), cut to 32 bits."""
    torch.bitwise_right_shift(product, 32, out=word)
    word.bitwise_xor_(other).bitwise_xor_(key).bitwise_and_(_WORD)

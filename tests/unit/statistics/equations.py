"""The statistics of one linear from whole tensors: the equations once more, straight in FP64 NumPy.

Nothing here is shared with the package but the random numbers of stochastic rounding. Where
rounding is to nearest, operands come from the NumPy quantizer of the quantizers' tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_snip.formats import FORMATS
from megatron_snip.quantizers import StochasticStream, StreamKey, quantize_dequantize
from tests.unit.quantizers import oracle

Array = np.ndarray


@dataclass(frozen=True)
class Microbatch:
    """Whole tensors of one linear on one microbatch; FP32 NumPy.

    Attributes:
        index: global index within the step.
        x: [M, K].
        g: [M, N], as the backward sees it.
        x_probe: [M, K] under the probe.
        g_probe: [M, N] under the probe.
        rows: the tokens that the probe compares.
    """

    index: int
    x: Array
    g: Array
    x_probe: Array
    g_probe: Array
    rows: Array


@dataclass(frozen=True)
class Linear:
    """What stays the same over microbatches.

    Attributes:
        name: its name.
        w: [N, K].
        d: [N, K], D before normalization.
        update_square: |update|^2.
    """

    name: str
    w: Array
    d: Array
    update_square: float


@dataclass(frozen=True)
class Scales:
    """Attributes: `batch_tokens` T; `grad` from g to the batch mean's gradient; `eps`; `seed`.

    `bits` of mantissa that X and G are stored with, or None where their rounding does not count.
    """

    batch_tokens: int
    grad: float
    eps: float
    seed: int
    step: int
    bits: int | None = None


def dequantized(x: Array, name: str, block: tuple[int, int], whole: Array | None = None) -> Array:
    """Round to nearest even in `name`; `whole` has the largest value where x is a part of it."""
    amax = None if whole is None else np.float32(np.abs(whole).max())
    return oracle.quantize(x, FORMATS[name], block, amax)[2].astype(np.float64)


def dequantized_grad(
    linear: Linear, batch: Microbatch, name: str, gemm: str, block: tuple[int, int], s: Scales
) -> Array:
    """Quantize G as the format says (for dgrad the sampled tokens), with the linear's stream."""
    g = batch.g[batch.rows] if gemm == "dgrad" else batch.g
    if not FORMATS[name].stochastic_grad:
        return dequantized(g, name, block, batch.g)
    key = StreamKey(s.seed, linear.name, s.step, batch.index, f"grad_output.{gemm}")
    out = quantize_dequantize(
        torch.from_numpy(g),
        FORMATS[name],
        block,
        stream=StochasticStream(key),
        tensor_amax=torch.from_numpy(np.abs(batch.g).max(keepdims=True)),
    )
    return out.double().numpy()


def base_row(linear: Linear, batches: Sequence[Microbatch], s: Scales) -> dict[str, float]:
    """The fields of `LinearStatistics` that do not depend on a format."""
    total: dict[str, float] = dict.fromkeys(
        [
            "microbatches",
            "tokens",
            "input_square",
            "weight_square",
            "output_square",
            "grad_square",
            "wgrad_square",
            "probe_tokens",
            "probe_input_square",
            "probe_input_noise",
            "probe_grad_square",
            "probe_grad_noise",
        ],
        0.0,
    )
    whole, apart = np.zeros(2), np.zeros(2)
    signs_all, signs_n = signs("whole", 1, s), signs("output", len(linear.w), s)
    whole_sketches, apart_sketches = [], []
    for b in batches:
        x, g, w = b.x.astype(np.float64), b.g.astype(np.float64) * s.grad, linear.w.astype("f8")
        change_g, change_x = probe_changes(b, s)
        y = (x @ w.T)[b.rows]
        noise = rounding_variance(b.g, b, s) * s.grad**2 * y**2
        apart = apart + coherent(change_g * y, noise, len(x), s)
        whole = whole + coherent((change_g * y).sum(1)[:, None], noise, len(x), s)
        apart_sketches.append(signs_n @ over_tokens(change_g * y, len(x)))
        whole_sketches.append(signs_all @ over_tokens((change_g * y).sum(1)[:, None], len(x)))
        total["microbatches"] += 1
        total["tokens"] += len(x)
        total["input_square"] += (x**2).sum()
        total["weight_square"] += (w**2).sum()
        total["output_square"] += ((x @ w.T) ** 2).sum()
        total["grad_square"] += (g**2).sum()
        total["wgrad_square"] += ((g.T @ x) ** 2).sum()
        per_row = len(x) / len(b.rows) / s.eps**2  # the sample stands for all tokens
        total["probe_tokens"] += len(b.rows)
        total["probe_input_square"] += (change_x**2).sum() * per_row
        total["probe_input_noise"] += rounding_variance(b.x, b, s).sum() * per_row
        total["probe_grad_square"] += (change_g**2).sum() * per_row
        total["probe_grad_noise"] += rounding_variance(b.g, b, s).sum() * per_row * s.grad**2
    squares = {
        "scale_square": (whole, whole_sketches),
        "scale_channel_square": (apart, apart_sketches),
    }
    joined = {}
    for k, (pair, z) in squares.items():  # of one sum alone, only the whole square is >= 0
        own = max(pair.sum(), 0.0) if k == "scale_square" else np.maximum(pair, 0).sum()
        joined[k] = max(float((own + across(z)) / s.eps**2), 0.0)
    return total | joined | {"update_square": linear.update_square}


def probe_changes(b: Microbatch, s: Scales) -> tuple[Array, Array]:
    """(dG, dX) of the sampled tokens, of the batch mean's gradient."""
    change_g = (b.g_probe.astype("f8") - b.g)[b.rows] * s.grad
    return change_g, (b.x_probe.astype("f8") - b.x)[b.rows]


def rounding_variance(x: Array, b: Microbatch, s: Scales) -> Array:
    """Variance of the difference of two roundings to a format of `bits` stored bits of mantissa."""
    if s.bits is None:
        return np.zeros_like(x[b.rows], dtype="f8")
    exponents = np.floor(np.log2(np.abs(x[b.rows]).astype("f8")))
    return 2.0 ** (2 * (exponents - s.bits)) / 6


def coherent(terms: Array, noise: Array | float, tokens: int, s: Scales) -> Array:
    """sum_c (sum over all tokens)^2 from a sample: pairs of equal and of unequal tokens apart.

    Products of unequal tokens are known for those of different groups: of four, or of one where
    all tokens are sampled and no noise comes off.
    """
    sampled = len(terms)
    pairs = np.einsum("tc,uc->tu", terms, terms)
    group = np.arange(sampled) % (1 if sampled == tokens and s.bits is None else 4)
    apart = group[:, None] != group[None, :]
    if not apart.any():
        return np.array([pairs.sum(), 0.0])
    per_pair = pairs[apart].mean()
    equal = pairs[~apart].sum() - per_pair * ((~apart).sum() - sampled)
    rest = per_pair * tokens * (tokens - 1) if sampled < tokens else pairs.sum() - equal
    return np.array([(equal - np.sum(noise)) * tokens / sampled, rest])


def signs(axis: str, channels: int, s: Scales) -> Array:
    """[64, channels], of length 1 a channel: the bits of four words a channel, or one place."""
    key = StreamKey(s.seed, "channels", s.step, 0, f"sketch.{axis}")
    if axis == "whole":
        return np.eye(64)[:, :1] * (1.0 if key.word & 1 else -1.0)
    words = StochasticStream(key).bits16(range(4), range(channels), channels).numpy()
    bits = [words[i // 16].astype("i8") >> (i % 16) & 1 for i in range(64)]
    return (2.0 * np.array(bits) - 1) / 8


def over_tokens(terms: Array, tokens: int) -> Array:
    """Sums over all tokens from a sample of them, [channels]."""
    return terms.sum(0) * tokens / len(terms)


def across(sketches: Sequence[Array]) -> float:
    """The products of different microbatches' sketches."""
    return 2 * sum(float(a @ b) for i, a in enumerate(sketches) for b in sketches[:i])


def format_row(
    linear: Linear, batches: Sequence[Microbatch], name: str, s: Scales
) -> dict[str, float]:
    """The fields of `FormatStatistics`."""
    fmt, w = FORMATS[name], linear.w.astype(np.float64)
    n = len(w)
    tile, (rows, cols) = fmt.tile, fmt.weight_block
    w_f = dequantized(linear.w, name, (rows, cols))
    w_d = dequantized(linear.w, name, (cols, rows))
    total: dict[str, float] = {}
    parts = dict.fromkeys(("forward_channel", "backward", "forward_whole"), np.zeros(2))
    signs_n, signs_k = signs("output", n, s), signs("input", w.shape[1], s)
    signs_all = signs("whole", 1, s)
    sketches: dict[str, list[Array]] = {key: [] for key in (*parts, "local")}

    def add(key: str, value: float) -> None:
        total[key] = total.get(key, 0.0) + float(value)

    for b in batches:
        x, g = b.x.astype(np.float64), b.g.astype(np.float64)
        x_f = dequantized(b.x, name, (1, tile))
        x_w = dequantized(b.x, name, (tile, 1))
        g_d = dequantized_grad(linear, b, name, "dgrad", (1, tile), s)
        g_w = dequantized_grad(linear, b, name, "wgrad", (tile, 1), s)
        e_y = x_f @ w_f.T - x @ w.T
        e_w = (g_w.T @ x_w - g.T @ x) * s.grad
        g = g * s.grad
        first = (g * e_y).sum()
        add("first", first)
        add("first_abs", abs(first))
        add("first_square", first**2)
        fisher = ((e_y**2).sum(1) * (g**2).sum(1)).sum()
        add("fisher", 0.5 * fisher * s.batch_tokens / n)
        add("aligned_fisher", 0.5 * ((g * e_y).sum(1) ** 2).sum() * s.batch_tokens)
        d_g, d_x = probe_changes(b, s)
        noise_g = rounding_variance(b.g, b, s) * s.grad**2
        noise_x = rounding_variance(b.x, b, s)
        by_w, by_x = (x @ (w_f - w).T)[b.rows], (d_g @ w) * (x_f - x)[b.rows]
        forward = coherent(d_g * by_w, noise_g * by_w**2, len(x), s)
        forward = forward + coherent(by_x, 0.0, len(x), s)
        by_token = ((d_g * by_w).sum(1) + by_x.sum(1))[:, None]
        whole = coherent(by_token, noise_g * by_w**2, len(x), s)
        sketches["forward_whole"].append(signs_all @ over_tokens(by_token, len(x)) / s.eps)
        common = signs_n @ over_tokens(d_g * by_w, len(x)) + signs_k @ over_tokens(by_x, len(x))
        sketches["forward_channel"].append(common / s.eps)
        by_w = (g @ (w_d - w))[b.rows]
        by_g = (d_x @ w.T) * (g_d - b.g[b.rows]) * s.grad
        backward = coherent(d_x * by_w, noise_x * by_w**2, len(x), s)
        backward = backward + coherent(by_g, 0.0, len(x), s)
        common = signs_k @ over_tokens(d_x * by_w, len(x)) + signs_n @ over_tokens(by_g, len(x))
        sketches["backward"].append(common / s.eps)
        changed = linear.d * e_w / linear.update_square**0.5
        sketches["local"].append(((signs_n @ changed) * signs_k).sum(1) * 8)
        parts["forward_channel"] = parts["forward_channel"] + forward
        parts["backward"] = parts["backward"] + backward
        parts["forward_whole"] = parts["forward_whole"] + whole
        add("local_square", ((linear.d * e_w) ** 2).sum() / linear.update_square)
        add("output_error_square", (e_y**2).sum())
        add("output_shift", (e_y * (x @ w.T)).sum())
        add("input_error_square", ((x_f - x) ** 2).sum())
        add("weight_error_square", ((w_f - w) ** 2).sum())
        add("grad_error_square", ((g_w - b.g) ** 2).sum() * s.grad**2)
        add("wgrad_error_square", (e_w**2).sum())
    for key, pair in parts.items():  # what a sample's pairs take away is chance
        own = max(pair.sum(), 0.0) if key == "forward_whole" else np.maximum(pair, 0).sum()
        total[f"{key}_square"] = float(own / s.eps**2)
    for key, seen in sketches.items():
        total[f"{key}_square"] = max(total[f"{key}_square"] + across(seen), 0.0)
    return total

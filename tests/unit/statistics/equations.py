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
    """Attributes: `batch_tokens` T; `grad` from g to the batch mean's gradient; `eps`; `seed`."""

    batch_tokens: int
    grad: float
    eps: float
    seed: int
    step: int


def dequantized(x: Array, name: str, block: tuple[int, int]) -> Array:
    """Round to nearest even in `name`."""
    return oracle.quantize(x, FORMATS[name], block)[2].astype(np.float64)


def dequantized_grad(
    linear: Linear, batch: Microbatch, name: str, gemm: str, block: tuple[int, int], s: Scales
) -> Array:
    """Quantize G as the format says, with the stream of the whole tensor."""
    if not FORMATS[name].stochastic_grad:
        return dequantized(batch.g, name, block)
    key = StreamKey(s.seed, linear.name, s.step, batch.index, f"grad_output.{gemm}")
    out = quantize_dequantize(
        torch.from_numpy(batch.g), FORMATS[name], block, stream=StochasticStream(key)
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
            "probe_grad_square",
            "probe_input_square",
        ],
        0.0,
    )
    for b in batches:
        x, g, w = b.x.astype(np.float64), b.g.astype(np.float64) * s.grad, linear.w.astype("f8")
        change_g, change_x = probe_changes(b, s)
        total["microbatches"] += 1
        total["tokens"] += len(x)
        total["input_square"] += (x**2).sum()
        total["weight_square"] += (w**2).sum()
        total["output_square"] += ((x @ w.T) ** 2).sum()
        total["grad_square"] += (g**2).sum()
        total["wgrad_square"] += ((g.T @ x) ** 2).sum()
        total["probe_grad_square"] += change_g.sum()
        total["probe_input_square"] += change_x.sum()
    return total | {"update_square": linear.update_square}


def probe_changes(b: Microbatch, s: Scales) -> tuple[Array, Array]:
    """(|dG_t / eps|^2, |dX_t / eps|^2) of the sampled tokens, scaled up to all tokens."""
    share = len(b.x) / len(b.rows)
    change_g = (b.g_probe.astype("f8") - b.g)[b.rows] * s.grad / s.eps
    change_x = (b.x_probe.astype("f8") - b.x)[b.rows] / s.eps
    return (change_g**2).sum(1) * share, (change_x**2).sum(1) * share


def format_row(
    linear: Linear, batches: Sequence[Microbatch], name: str, s: Scales
) -> dict[str, float]:
    """The fields of `FormatStatistics`."""
    fmt, w = FORMATS[name], linear.w.astype(np.float64)
    n, k = w.shape
    tile, (rows, cols) = fmt.tile, fmt.weight_block
    w_f = dequantized(linear.w, name, (rows, cols))
    w_d = dequantized(linear.w, name, (cols, rows))
    total: dict[str, float] = {}

    def add(key: str, value: float) -> None:
        total[key] = total.get(key, 0.0) + float(value)

    for b in batches:
        x, g = b.x.astype(np.float64), b.g.astype(np.float64)
        x_f = dequantized(b.x, name, (1, tile))
        x_w = dequantized(b.x, name, (tile, 1))
        g_d = dequantized_grad(linear, b, name, "dgrad", (1, tile), s)
        g_w = dequantized_grad(linear, b, name, "wgrad", (tile, 1), s)
        e_y = x_f @ w_f.T - x @ w.T
        e_x = (g_d @ w_d - g @ w) * s.grad
        e_w = (g_w.T @ x_w - g.T @ x) * s.grad
        g = g * s.grad
        first = (g * e_y).sum()
        change_g, change_x = probe_changes(b, s)
        add("first", first)
        add("first_abs", abs(first))
        add("first_square", first**2)
        fisher = ((e_y**2).sum(1) * (g**2).sum(1)).sum()
        add("fisher", 0.5 * fisher * s.batch_tokens / n)
        add("forward_square", ((e_y[b.rows] ** 2).sum(1) * change_g).sum() / n)
        add("backward_square", ((e_x[b.rows] ** 2).sum(1) * change_x).sum() / k)
        add("local_square", ((linear.d * e_w) ** 2).sum() / linear.update_square)
        add("output_error_square", (e_y**2).sum())
        add("input_error_square", ((x_f - x) ** 2).sum())
        add("weight_error_square", ((w_f - w) ** 2).sum())
        add("grad_error_square", ((g_d - b.g) ** 2).sum() * s.grad**2)
        add("wgrad_error_square", (e_w**2).sum())
    return total

"""How a linear's errors couple to what the probe changed: fwd^2 and bwd^2.

With dG and dX the changes under W_k + eps D_k r_k for all k (probe.py), an error eY in the output
and an error eX in the input gradient change all weights' updates by

    fwd^2 = E_r ( sum_t <dG_t, eY_t> / eps )^2        bwd^2 = E_r ( sum_t <dX_t, eX_t> / eps )^2

One draw of r gives one sample of each expectation, far too noisy. But errors of different
channels are nearly independent, so the square of the sum over channels may be replaced by the sum
over channels of squares, which averages thousands of samples. Within a channel the sum over tokens
stays inside of the square: the rounding of a weight is the same for all tokens, and that of
activations is biased, so their effects add up over tokens. To first order the errors split as

    eY = X dW^T + dX_q W^T     channels: rows n of W for dW, in_features k for dX_q = Q(X) - X
    eX = G dW   + dG_q W       channels: in_features k for dW, out_features n for dG_q = Q(G) - G

    channels of fwd^2:  sum_n (sum_t dG_tn (X_t dW_n))^2 + sum_k (sum_t (dG W)_tk dX_q,tk)^2
    bwd^2:              sum_k (sum_t dX_tk (G_t dW_k))^2 + sum_n (sum_t (dX W^T)_tn dG_q,tn)^2

Rounding to nearest also shrinks (small values become 0), so a part of eY points along -Y in all
channels alike, which the sum over channels misses by up to ninefold where the output goes straight
into the residual stream (linear_proj, linear_fc2). The whole, (sum_t <dG_t, eY_t>)^2, has that part
and the noise of one sample a probe: both are kept, and the larger counts (records.py). Gradients
are rounded without bias, so bwd^2 has no such part; benchmarks/fidelity.py shows the evidence.

The sums run over R sampled of M tokens; squares of sums over all tokens are estimated without bias
from the sample, and rounding noise in dG and dX (BF16) is subtracted where it enters squared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_snip.collectives import sum_over
from megatron_snip.matmul import matmul_fp32
from megatron_snip.quantizers import quantize_dequantize_operand
from megatron_snip.statistics.observation import Observation, ProbedRows, SampledRows
from megatron_snip.topology import Placement
from megatron_snip.types import Gemm, Operand


@dataclass
class _Products:
    """Products of sampled rows with the weight and its errors, maybe partial sums."""

    over_n: torch.Tensor  # [1 + F, R, K]: dG W, then G dW of each format
    over_k: torch.Tensor  # [1 + F, R, N]: dX W^T, then X dW^T of each format


@dataclass
class _Terms:
    """The terms of one format whose sums over tokens are squared, with variances of noise."""

    output: torch.Tensor  # [R, N]: dG_tn (X_t dW_n)
    output_noise: torch.Tensor | None
    input: torch.Tensor  # [R, K]: (dG W)_tk dX_q,tk
    back_input: torch.Tensor  # [R, K]: dX_tk (G_t dW_k)
    back_input_noise: torch.Tensor | None
    back_output: torch.Tensor  # [R, N]: (dX W^T)_tn dG_q,tn


def couple(
    placement: Placement,
    weight: torch.Tensor,
    seen: Observation,
    formats: Sequence[str],
    num_probes: int = 1,
) -> str | None:
    """All ranks of the linear's tensor axis: add one probe's part to `seen.couplings`.

    Args:
        placement: which linear.
        weight: W [N, K] of this shard, not perturbed.
        seen: an observation that the probe has visited.
        formats: the formats measured, in the observation's order.
        num_probes: over how many probes the couplings are averaged.

    Returns:
        Why it failed on this rank (then zeros took part in the sums), or None.
    """
    sampled, probed = seen.sampled, seen.probed
    seen.probed = None
    if sampled is None or probed is None:  # e.g. an expert that saw other tokens under the probe
        return None
    group = placement.tensor.group
    failure = None
    try:
        products = _products(weight, sampled, probed, formats)
    except Exception as error:
        failure = f"{placement.name}: {type(error).__name__}: {error}"
        products = _nothing(weight, sampled, formats)
    sum_over(products.over_n if placement.kind == "column" else products.over_k, group)
    input_share, output_share = _shares(placement)
    tokens, whole = seen.grad.numel(), []
    for f in range(len(formats)):
        terms = _terms(products, sampled, probed, f)
        channels = coherent_parts(terms.output, terms.output_noise, tokens) * output_share
        channels += coherent_parts(terms.input, None, tokens) * input_share
        backward = coherent_parts(terms.back_input, terms.back_input_noise, tokens) * input_share
        backward += coherent_parts(terms.back_output, None, tokens) * output_share
        seen.couplings[f, 0] += channels / num_probes
        seen.couplings[f, 2] += backward / num_probes
        whole.append(terms.output.sum(1) * output_share + terms.input.sum(1) * input_share)
    for f, per_token in enumerate(sum_over(torch.stack(whole), group)):  # [R]
        parts = coherent_parts(per_token[:, None], None, tokens)
        seen.couplings[f, 1] += parts / (num_probes * placement.tensor.size)
    return failure


def _shares(placement: Placement) -> tuple[float, float]:
    """Weights of sums over in_features and over out_features: 1 / ranks where all hold them."""
    share = 1.0 / placement.tensor.size
    return (share, 1.0) if placement.kind == "column" else (1.0, share)


def _products(
    weight: torch.Tensor, sampled: SampledRows, probed: ProbedRows, formats: Sequence[str]
) -> _Products:
    over_n = [matmul_fp32(probed.grad_change, weight)]
    over_k = [matmul_fp32(probed.input_change, weight.t())]
    for name in formats:
        error = _weight_error(weight, name, Gemm.DGRAD)
        over_n.append(matmul_fp32(sampled.grad, error))
        error = _weight_error(weight, name, Gemm.FPROP)
        over_k.append(matmul_fp32(sampled.input, error.t()))
    return _Products(torch.stack(over_n), torch.stack(over_k))


def _nothing(weight: torch.Tensor, sampled: SampledRows, formats: Sequence[str]) -> _Products:
    rows, (n, k) = sampled.input.shape[0], weight.shape
    shape = (1 + len(formats), rows)
    return _Products(
        torch.zeros((*shape, k), device=weight.device),
        torch.zeros((*shape, n), device=weight.device),
    )


def _weight_error(weight: torch.Tensor, name: str, gemm: Gemm) -> torch.Tensor:
    quantized = quantize_dequantize_operand(weight, name, Operand.WEIGHT, gemm, dtype=torch.float32)
    return quantized.sub_(weight)


def _terms(products: _Products, sampled: SampledRows, probed: ProbedRows, f: int) -> _Terms:
    by_output, by_input = products.over_k[1 + f], products.over_n[1 + f]
    return _Terms(
        output=probed.grad_change * by_output,
        output_noise=_scaled(probed.grad_noise, by_output),
        input=products.over_n[0] * sampled.input_error[f],
        back_input=probed.input_change * by_input,
        back_input_noise=_scaled(probed.input_noise, by_input),
        back_output=products.over_k[0] * sampled.grad_error[f],
    )


def _scaled(noise: torch.Tensor | None, factor: torch.Tensor) -> torch.Tensor | None:
    return None if noise is None else noise * factor.square()


def coherent_parts(
    terms: torch.Tensor, noise: torch.Tensor | None, num_tokens: int
) -> torch.Tensor:
    """Estimate sum_c (sum over all tokens of terms_tc)^2 from sampled tokens, without bias.

    sum_t a_t^2 over the sample stands for the diagonal, (sum_t a_t)^2 - sum_t a_t^2 for the
    off-diagonal; each is scaled from pairs sampled to pairs there are. The two add up over
    shards, microbatches and ranks before `coherent_square` joins them.

    Args:
        terms: [R, C], the sampled tokens' terms.
        noise: [R, C], variance of the terms that is not signal, or None.
        num_tokens: M >= R.

    Returns:
        [2] FP64: diagonal less noise, off-diagonal.
    """
    sampled = terms.shape[0]
    diagonal = terms.square().sum(dtype=torch.float64)
    off_diagonal = terms.sum(dim=0, dtype=torch.float64).square().sum() - diagonal
    signal = diagonal if noise is None else diagonal - noise.sum(dtype=torch.float64)
    whole, pairs = num_tokens / max(sampled, 1), 0.0
    if sampled > 1:
        pairs = num_tokens * (num_tokens - 1) / (sampled * (sampled - 1))
    return torch.stack([signal * whole, off_diagonal * pairs])


def coherent_square(diagonal: float, off_diagonal: float, all_sampled: bool) -> float:
    """Join summed parts, >= 0; of a sample, a negative off-diagonal is chance and counts as 0."""
    if all_sampled:
        return _at_least_0(diagonal + off_diagonal)
    return _at_least_0(diagonal) + _at_least_0(off_diagonal)


def _at_least_0(value: float) -> float:
    return 0.0 if value < 0 else value  # NaN stays

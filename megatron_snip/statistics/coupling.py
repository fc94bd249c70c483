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

Rounding to nearest also shrinks (small values become 0): a part c Y of eY points along the output
in all channels alike, which the sum over channels misses by up to ninefold where the output goes
straight into the residual stream (linear_proj, linear_fc2). It is added, as

    c^2 scale^2     c = sum <eY, Y> / sum |Y|^2     scale^2 = E_r ( sum_t <dG_t, Y_t> / eps )^2

where scale^2, the change of the updates with the scale of the output, is again one sample a probe:
its sum over channels apart, sum_n (sum_t dG_tn Y_tn)^2, comes along for `pooling.py`, which takes
most of the chance out of it. Neither turns on how a single element was rounded, as the square of
<dG, eY> over all tokens and channels does. Gradients are rounded without bias, so bwd^2 has no
such part; benchmarks/fidelity.py shows the evidence.

The sums over t run over the tokens of all microbatches, of each over R sampled of its M; squares of
sums over one's tokens are estimated without bias from the sample (coherence.py), and what several
have in common is added from sketches (sketch.py). One approximation: rounding noise in dG and dX
(BF16) is subtracted where they enter squared themselves, not in their products with W.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron_snip.collectives import sum_over
from megatron_snip.formats import FORMATS
from megatron_snip.matmul import matmul_fp32
from megatron_snip.quantizers import StochasticStream, quantize_dequantize_operand
from megatron_snip.statistics.changes import Changes, take_changes
from megatron_snip.statistics.coherence import coherent_parts
from megatron_snip.statistics.observation import Observation, SampledRows
from megatron_snip.statistics.recorder import MeasureSettings
from megatron_snip.statistics.sketch import Sketcher, SketchSigns
from megatron_snip.streams import grad_output_stream
from megatron_snip.topology import Placement
from megatron_snip.types import Gemm, Operand


@dataclass
class _Products:
    """Products of one microbatch's sampled rows with the weight and its errors."""

    changes: Changes
    over_n: torch.Tensor  # [1 + F, R, K]: dG W, then G dW of each format
    over_k: torch.Tensor  # [2 + F, R, N]: dX W^T, X W^T, then X dW^T of each format


def couple(
    placement: Placement,
    weight: torch.Tensor,
    observations: Sequence[Observation],
    settings: MeasureSettings,
    signs: SketchSigns,
    draw: int = 0,
) -> str | None:
    """All ranks of the linear's tensor axis: add one probe's part to the observations.

    Args:
        placement: which linear.
        weight: W [N, K] of this shard, not perturbed.
        observations: its microbatches, the same number on all these ranks.
        settings: what the refresh measures; formats in the observations' order.
        signs: of the refresh.
        draw: which probe.

    Returns:
        Why it failed on this rank (then zeros took part in the sums), or None.
    """
    # An expert may have seen other tokens under the probe than in pass A.
    visited = [o for o in observations if o.sampled is not None and o.probed is not None]
    if not visited:
        return None
    group, failure = placement.tensor.group, None
    per_token = [torch.zeros((2, o.rows.numel()), device=weight.device) for o in visited]
    products = None
    try:
        products = _products(placement, weight, visited, settings)
    except Exception as error:
        failure = f"{placement.name}: {type(error).__name__}: {error}"
    if products is None:  # out of the handler: the error held all that had been made
        products = [_nothing(weight, o, len(settings.formats)) for o in visited]
    for product in products:
        sum_over(product.over_n if placement.kind == "column" else product.over_k, group)
    sketcher = None
    try:
        sketcher = signs.sketcher(placement, draw, weight.device)
        for i, (seen, product) in enumerate(zip(visited, products, strict=True)):
            _add_channels(placement, seen, product, settings, sketcher)
            per_token[i] = _scale_terms(product)
    except Exception as error:
        failure = failure or f"{placement.name}: {type(error).__name__}: {error}"
    _add_scales(placement, visited, per_token, settings.num_probes, sketcher)
    for seen in visited:
        seen.probed = None
    return failure


def _products(
    placement: Placement,
    weight: torch.Tensor,
    visited: Sequence[Observation],
    settings: MeasureSettings,
) -> list[_Products]:
    """Format by format, so that one error of the weight is held at a time."""
    changes = [take_changes(placement, o, settings.num_probes) for o in visited]
    over_n = [[matmul_fp32(c.grad, weight)] for c in changes]
    over_k = [[matmul_fp32(c.input, weight.t())] for c in changes]
    for rows, o in zip(over_k, visited, strict=True):
        rows.append(matmul_fp32(_sampled(o).input, weight.t()))
    for name in settings.formats:
        error = _error(weight, name, Operand.WEIGHT, Gemm.FPROP)
        for rows, o in zip(over_k, visited, strict=True):
            rows.append(matmul_fp32(_sampled(o).input, error.t()))
        height, width = FORMATS[name].weight_block
        if height != width:  # a square block makes one quantized weight serve both GEMMs
            error = _error(weight, name, Operand.WEIGHT, Gemm.DGRAD)
        for rows, o in zip(over_n, visited, strict=True):
            rows.append(matmul_fp32(_sampled(o).grad, error))
    return [
        _Products(c, torch.stack(n), torch.stack(k))
        for c, n, k in zip(changes, over_n, over_k, strict=True)
    ]


def _nothing(weight: torch.Tensor, seen: Observation, num_formats: int) -> _Products:
    """Zeros of the shapes that `_products` gives, for the collectives of a failed rank."""
    r, (n, k) = seen.rows.numel(), weight.shape

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, device=weight.device)

    changes = Changes(zeros(r, k), zeros(r, n), None, None)
    return _Products(changes, zeros(1 + num_formats, r, k), zeros(2 + num_formats, r, n))


def _add_channels(
    placement: Placement,
    seen: Observation,
    product: _Products,
    settings: MeasureSettings,
    sketcher: Sketcher,
) -> None:
    """Add the sums over channels of squares: fwd^2 and bwd^2 of each format, and scale^2."""
    tokens, changes, probes = seen.grad.numel(), product.changes, settings.num_probes
    input_share, output_share = _shares(placement)
    inputs = _Channels(sketcher.of_inputs, input_share, tokens, probes)
    outputs = _Channels(sketcher.of_outputs, output_share, tokens, probes)
    by_grad, by_input, output = product.over_n[0], product.over_k[0], product.over_k[1]
    noise = _scaled(changes.grad_noise, output)
    outputs.add(seen.scalings[1], seen.sketches[1], changes.grad * output, noise)
    for f in range(len(settings.formats)):
        input_error, grad_error = _row_errors(placement, seen, settings, f)
        forward, backward = seen.couplings[f]
        across_forward, across_backward, _ = seen.sketches[2 + 3 * f : 5 + 3 * f]
        by_weight = product.over_k[2 + f]
        noise = _scaled(changes.grad_noise, by_weight)
        outputs.add(forward, across_forward, changes.grad * by_weight, noise)
        inputs.add(forward, across_forward, by_grad * input_error, None)
        by_weight = product.over_n[1 + f]
        noise = _scaled(changes.input_noise, by_weight)
        inputs.add(backward, across_backward, changes.input * by_weight, noise)
        outputs.add(backward, across_backward, by_input * grad_error, None)


@dataclass(frozen=True)
class _Channels:
    """How terms of a shard's in_features, or of its out_features, are added."""

    sketch: Callable[[torch.Tensor], torch.Tensor]
    share: float  # 1 / ranks that hold the same channels
    num_tokens: int
    num_probes: int

    def add(
        self,
        square: torch.Tensor,
        across: torch.Tensor,
        terms: torch.Tensor,
        noise: torch.Tensor | None,
    ) -> None:
        """Add [R, C] terms of the sampled tokens to a square's parts and to its sketch."""
        parts, sums = coherent_parts(terms, noise, self.num_tokens)
        square += parts * (self.share / self.num_probes)
        across += self.sketch(sums) * (self.share / self.num_probes**0.5)


def _scale_terms(product: _Products) -> torch.Tensor:
    """Return [2, R]: <dG_t, Y_t> over this shard's channels, and its variance from rounding."""
    output, changes = product.over_k[1], product.changes
    terms = (changes.grad * output).sum(1)
    noise = _scaled(changes.grad_noise, output)
    return torch.stack([terms, torch.zeros_like(terms) if noise is None else noise.sum(1)])


def _add_scales(
    placement: Placement,
    visited: Sequence[Observation],
    per_token: Sequence[torch.Tensor],
    num_probes: int,
    sketcher: Sketcher | None,
) -> None:
    """All ranks of the tensor axis: add scale^2 of all channels together."""
    joined = torch.cat(list(per_token), dim=1)
    if placement.kind == "column":  # a row-parallel linear's ranks all hold the whole output
        sum_over(joined, placement.tensor.group)
    pieces = torch.split(joined, [part.shape[1] for part in per_token], dim=1)
    if sketcher is None:  # this rank failed
        return
    whole = 1.0 / placement.tensor.size
    for seen, (terms, noise) in zip(visited, pieces, strict=True):
        channel = _Channels(sketcher.of_whole, whole, seen.grad.numel(), num_probes)
        channel.add(seen.scalings[0], seen.sketches[0], terms[:, None], noise[:, None])


def _row_errors(
    placement: Placement, seen: Observation, settings: MeasureSettings, f: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return Q(X) - X [R, K] and Q(G) - G [R, N] at the sampled tokens, as fprop and dgrad do."""
    name, rows = settings.formats[f], _sampled(seen)
    stream = grad_output_stream(settings.seed, placement, settings.step, seen.microbatch)
    return (
        _error(rows.input, name, Operand.INPUT, Gemm.FPROP, rows.input_amax),
        _error(rows.grad, name, Operand.GRAD_OUTPUT, Gemm.DGRAD, rows.grad_amax, stream),
    )


def _error(
    tensor: torch.Tensor,
    name: str,
    operand: Operand,
    gemm: Gemm,
    amax: torch.Tensor | None = None,
    stream: StochasticStream | None = None,
) -> torch.Tensor:
    quantized = quantize_dequantize_operand(
        tensor, name, operand, gemm, stream=stream, tensor_amax=amax, dtype=torch.float32
    )
    return quantized.sub_(tensor)


def _sampled(seen: Observation) -> SampledRows:
    assert seen.sampled is not None
    return seen.sampled


def _shares(placement: Placement) -> tuple[float, float]:
    """Weights of sums over in_features and over out_features: 1 / ranks where all hold them."""
    share = 1.0 / placement.tensor.size
    return (share, 1.0) if placement.kind == "column" else (1.0, share)


def _scaled(noise: torch.Tensor | None, factor: torch.Tensor) -> torch.Tensor | None:
    return None if noise is None else noise * factor.square()

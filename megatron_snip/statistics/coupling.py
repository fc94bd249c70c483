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
most of the chance out of it. Other ways in which channels go together, above all in the first
layers, are in the whole, (sum_t <dG_t, eY_t>)^2, alone: one sample a probe, which `pooling.py` lets
count for as much as that is worth. Gradients are rounded without bias, so bwd^2 needs neither;
benchmarks/fidelity.py shows the evidence.

No term is formed token by token. Over a group of tokens (coherence.py)

    sum_t dG_tn (X_t dW_n) = <dW_n, P_n>      P = dG^T X
    sum_t dX_tk (G_t dW_k) = <dW_k, P'_k>     P' = G^T dX

so that four products, dG^T X, G^T dX, dG W and dX W^T, serve all formats, and all that
tensor-parallel ranks need of each other are sums of a value a channel: each is linear in a shard.

The sums over t run over the tokens of all microbatches, of each over R sampled of its M; squares of
sums over one's tokens are estimated without bias from the sample (coherence.py), and what several
have in common is added from sketches (sketch.py). Two approximations: rounding noise in dG and dX
(BF16) is subtracted where they enter squared themselves, not in their products with W, and as the
same share of all of a channel's terms; off the whole comes the sum over channels.
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
from megatron_snip.statistics.coherence import Sample, coherent_parts
from megatron_snip.statistics.observation import Observation, SampledRows
from megatron_snip.statistics.recorder import MeasureSettings
from megatron_snip.statistics.records import ACROSS, ACROSS_BY_FORMAT
from megatron_snip.statistics.sketch import Sketcher, SketchSigns
from megatron_snip.streams import grad_output_stream
from megatron_snip.topology import Placement
from megatron_snip.types import Gemm, Operand


@dataclass
class _Sums:
    """Sums over each of G groups of tokens of one microbatch; F formats, FP64.

    Of this shard before `_join`, of the whole linear after it; of features that only this shard
    has, whole from the start.

    Attributes:
        inputs: [G, 2 F, K], a value an in_feature: of each format dX_q in fwd, then dW in bwd.
        outputs: [G, 1 + 2 F, N], a value an out_feature: Y, each format's dW in fwd, dG_q in bwd.
        wholes: [G, 1 + F], over all channels: <dG, Y>, then <dG, eY> of each format.
        grad_signal: [N], the share of |dG_n|^2 that is not rounding noise; None: all.
        input_signal: [K], likewise of |dX_k|^2.
    """

    inputs: torch.Tensor
    outputs: torch.Tensor
    wholes: torch.Tensor
    grad_signal: torch.Tensor | None = None
    input_signal: torch.Tensor | None = None

    @classmethod
    def zeros(cls, weight: torch.Tensor, groups: int, formats: int) -> _Sums:
        n, k = weight.shape

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=weight.device)

        return cls(
            zeros(groups, 2 * formats, k),
            zeros(groups, 1 + 2 * formats, n),
            zeros(groups, 1 + formats),
        )

    def shared(self, placement: Placement) -> list[torch.Tensor]:
        """What is a part of a sum over the linear's tensor axis, as long as it is not joined."""
        return [self.inputs if placement.kind == "column" else self.outputs, self.wholes]


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
    samples = [_sample(seen) for seen in visited]
    sums, failure = None, None
    try:
        sums = _local_sums(placement, weight, visited, samples, settings)
    except Exception as error:
        failure = f"{placement.name}: {type(error).__name__}: {error}"
    if sums is None:  # out of the handler: the error held all that had been made
        sums = [_Sums.zeros(weight, len(s.sizes), len(settings.formats)) for s in samples]
    _join(placement, sums)
    try:
        sketcher = signs.sketcher(placement, draw, weight.device)
        for seen, sample, part in zip(visited, samples, sums, strict=True):
            _add(placement, seen, sample, part, settings, sketcher)
    except Exception as error:
        failure = failure or f"{placement.name}: {type(error).__name__}: {error}"
    for seen in visited:
        seen.probed = None
    return failure


def _sample(seen: Observation) -> Sample:
    rows = _sampled(seen)
    noisy = {rows.grad.dtype, rows.input.dtype} != {torch.float32}
    return Sample.of(seen.rows.numel(), seen.grad.numel(), noisy)


def _local_sums(
    placement: Placement,
    weight: torch.Tensor,
    visited: Sequence[Observation],
    samples: Sequence[Sample],
    settings: MeasureSettings,
) -> list[_Sums]:
    """This shard's sums of each microbatch."""
    errors = _weight_errors(weight, settings.formats)
    exact = weight.float()
    found = []
    for seen, sample in zip(visited, samples, strict=True):
        changes = take_changes(placement, seen, settings.num_probes)
        sums = _Sums.zeros(weight, len(sample.sizes), len(settings.formats))
        sums.grad_signal = _signal(changes.grad, changes.grad_noise)
        sums.input_signal = _signal(changes.input, changes.input_noise)
        _add_weight_errors(sums, exact, errors, _sampled(seen), changes, sample)
        _add_row_errors(sums, placement, weight, seen, settings, changes, sample)
        forward = slice(1, 1 + len(settings.formats))
        sums.wholes[:, 0] = sums.outputs[:, 0].sum(-1)
        sums.wholes[:, 1:] = sums.outputs[:, forward].sum(-1)
        sums.wholes[:, 1:] += sums.inputs[:, : len(settings.formats)].sum(-1)
        found.append(sums)
    return found


def _weight_errors(
    weight: torch.Tensor, formats: Sequence[str]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return Q(W) - W [N, K] of each format, in fprop and in dgrad."""
    found = []
    for name in formats:
        error = _error(weight, name, Operand.WEIGHT, Gemm.FPROP)
        height, width = FORMATS[name].weight_block
        square = height == width  # then one quantized weight serves both GEMMs
        transposed = error if square else _error(weight, name, Operand.WEIGHT, Gemm.DGRAD)
        found.append((error, transposed))
    return found


def _add_weight_errors(
    sums: _Sums,
    weight: torch.Tensor,
    errors: Sequence[tuple[torch.Tensor, torch.Tensor]],
    rows: SampledRows,
    changes: Changes,
    sample: Sample,
) -> None:
    """Fill in what comes from products with W and dW, of a group of tokens at a time."""
    for j, group in enumerate(sample.groups):
        product = matmul_fp32(changes.grad[group].t(), rows.input[group])  # dG^T X
        sums.outputs[j, 0] = _over_inputs(weight, product)
        for f, (error, _) in enumerate(errors):
            sums.outputs[j, 1 + f] = _over_inputs(error, product)
        product = matmul_fp32(rows.grad[group].t(), changes.input[group])  # G^T dX
        for f, (_, error) in enumerate(errors):
            sums.inputs[j, len(errors) + f] = _over_outputs(error, product)


def _add_row_errors(
    sums: _Sums,
    placement: Placement,
    weight: torch.Tensor,
    seen: Observation,
    settings: MeasureSettings,
    changes: Changes,
    sample: Sample,
) -> None:
    """Fill in what comes from the rounding of X and G."""
    count = len(settings.formats)
    by_grad = matmul_fp32(changes.grad, weight)  # dG W
    by_input = matmul_fp32(changes.input, weight.t())  # dX W^T
    for f in range(count):
        input_error, grad_error = _row_errors(placement, seen, settings, f)
        input_error.mul_(by_grad)
        grad_error.mul_(by_input)
        for j, group in enumerate(sample.groups):
            sums.inputs[j, f] = input_error[group].sum(0)
            sums.outputs[j, 1 + count + f] = grad_error[group].sum(0)


def _over_inputs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """sum_k a_nk b_nk: [N]."""
    summed: torch.Tensor = torch.linalg.vecdot(a, b, dim=-1)
    return summed


def _over_outputs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """sum_n a_nk b_nk: [K]."""
    summed: torch.Tensor = torch.linalg.vecdot(a, b, dim=0)
    return summed


def _signal(change: torch.Tensor, noise: torch.Tensor | None) -> torch.Tensor | None:
    """Return the share of each channel's sum of squares [C] that is not noise; None: all."""
    if noise is None:
        return None
    square = change.square().sum(0, dtype=torch.float64)
    share = 1.0 - noise.sum(0, dtype=torch.float64) / square
    return share.where(square != 0, 0.0)


def _join(placement: Placement, sums: Sequence[_Sums]) -> None:
    """All ranks of the tensor axis: make the sums of the whole linear, in one exchange."""
    group = placement.tensor.group
    if group is None:
        return
    parts = [part for each in sums for part in each.shared(placement)]
    flat = sum_over(torch.cat([part.reshape(-1) for part in parts]), group)
    pieces = torch.split(flat, [part.numel() for part in parts])
    for part, piece in zip(parts, pieces, strict=True):
        part.copy_(piece.view(part.shape))


def _add(
    placement: Placement,
    seen: Observation,
    sample: Sample,
    sums: _Sums,
    settings: MeasureSettings,
    sketcher: Sketcher,
) -> None:
    """Add the squares' parts and sketches of one microbatch to its observation."""
    count, probes = len(settings.formats), settings.num_probes
    input_share, output_share = _shares(placement)
    inputs = _Terms(sketcher.of_inputs, input_share, sample, probes)
    outputs = _Terms(sketcher.of_outputs, output_share, sample, probes)
    wholes = _Terms(sketcher.of_whole, 1.0 / placement.tensor.size, sample, probes)
    wholes.add(seen.scalings[0], seen.sketches[0], sums.wholes[:, :1])
    noise = outputs.add(seen.scalings[1], seen.sketches[1], sums.outputs[:, 0], sums.grad_signal)
    seen.scalings[0, 0] -= noise  # rounding is independent from channel to channel
    for f in range(count):
        sketches = seen.sketches[len(ACROSS) + f * len(ACROSS_BY_FORMAT) :]
        channels, backward, whole = zip(seen.couplings[f], sketches, strict=False)
        noise = outputs.add(*channels, sums.outputs[:, 1 + f], sums.grad_signal)
        inputs.add(*channels, sums.inputs[:, f])
        inputs.add(*backward, sums.inputs[:, count + f], sums.input_signal)
        outputs.add(*backward, sums.outputs[:, 1 + count + f])
        wholes.add(*whole, sums.wholes[:, 1 + f : 2 + f])
        whole[0][0] -= noise


@dataclass(frozen=True)
class _Terms:
    """How sums over a shard's in_features, its out_features, or both are added."""

    sketch: Callable[[torch.Tensor], torch.Tensor]
    share: float  # 1 / ranks that hold the same sums
    sample: Sample
    num_probes: int

    def add(
        self,
        square: torch.Tensor,
        across: torch.Tensor,
        sums: torch.Tensor,
        signal: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Add groups' sums [G, C] to a square's parts and to its sketch, both in place.

        Returns:
            The noise that was taken off the square's diagonal.
        """
        parts, noise = coherent_parts(sums, self.sample, signal)
        square += parts * (self.share / self.num_probes)
        over_all = self.sketch(self.sample.over_all(sums))
        across += over_all * (self.share / self.num_probes**0.5)
        return noise * (self.share / self.num_probes)


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

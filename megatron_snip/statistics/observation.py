"""What one linear shows on one microbatch, as partial sums that add over tensor-parallel ranks.

A quantity that every tensor-parallel rank holds in full is divided by the group's size, so that
one sum over the group makes every entry right, whichever way the linear is sharded. Products of
two such sums (per token) are formed after that sum, in `reduce.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class SampledRows:
    """What pass A keeps of the sampled tokens for the probe. R tokens, F formats.

    Attributes:
        input: X [R, K] of this shard.
        grad: G [R, N] of this shard.
        input_error: [F, R, K], Q(X) - X of this shard with tiles along K, FP32.
        grad_error: [F, R, N], Q(G) - G of this shard with tiles along N, FP32.
    """

    input: torch.Tensor
    grad: torch.Tensor
    input_error: torch.Tensor
    grad_error: torch.Tensor


@dataclass
class ProbedRows:
    """What the probe changed at the sampled tokens.

    Attributes:
        input_change: dX [R, K] of this shard, FP32.
        grad_change: dG [R, N] of this shard, FP32.
        input_noise: [R, K] FP32, variance that rounding alone gives dX; None in FP32 compute.
        grad_noise: [R, N] FP32, likewise of dG.
    """

    input_change: torch.Tensor
    grad_change: torch.Tensor
    input_noise: torch.Tensor | None
    grad_noise: torch.Tensor | None


@dataclass
class Observation:
    """One linear on one microbatch. F formats, M tokens, R sampled tokens.

    Attributes:
        microbatch: global index of the microbatch within the step.
        rows: [R] int64, the sampled tokens.
        first: [F, M] FP64, <G_t, eY_t>.
        norms: [5] FP64: |X|^2, |W|^2, |Y|^2, |G|^2, |dW|^2.
        errors: [F, 5] FP64: |Q(X)-X|^2, |Q(W)-W|^2, |Q(G)-G|^2, |eW|^2, |D * eW|^2.
        output_error: [F, M] FP64, |eY_t|^2.
        grad: [M] FP64, |G_t|^2.
        couplings: [F, 3, 2] FP64, of fwd^2 over channels, of fwd^2 of the whole and of bwd^2, times
            eps^2: the parts that `coupling.coherent_square` joins; zeros before the probe.
        probe: [4] FP64, |dX|^2 and its noise, |dG|^2 and its noise, over the sampled tokens.
        sampled: tensors of the sampled tokens, until the probe has used them.
        probed: what the probe changed there, until it has been coupled.
    """

    microbatch: int
    rows: torch.Tensor
    first: torch.Tensor
    norms: torch.Tensor
    errors: torch.Tensor
    output_error: torch.Tensor
    grad: torch.Tensor
    couplings: torch.Tensor
    probe: torch.Tensor
    sampled: SampledRows | None = None
    probed: ProbedRows | None = None

    def parts(self) -> list[torch.Tensor]:
        """The tensors that are summed over tensor-parallel ranks, in a fixed order."""
        return [
            self.first,
            self.norms,
            self.errors,
            self.output_error,
            self.grad,
            self.couplings,
            self.probe,
        ]

    def replace_parts(self, parts: list[torch.Tensor]) -> None:
        """Put summed tensors back, in the order of `parts`."""
        (
            self.first,
            self.norms,
            self.errors,
            self.output_error,
            self.grad,
            self.couplings,
            self.probe,
        ) = parts

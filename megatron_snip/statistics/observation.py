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
    """What pass A keeps of R sampled tokens for the probe, in the dtype that it was seen in.

    Attributes:
        input: X [R, K] of this shard.
        grad: G [R, N] of this shard.
        input_amax: largest magnitude of all of X (of this shard), or None where no format asks.
        grad_amax: likewise of G.
    """

    input: torch.Tensor
    grad: torch.Tensor
    input_amax: torch.Tensor | None = None
    grad_amax: torch.Tensor | None = None


@dataclass
class ProbedRows:
    """The same tokens under the probe.

    Attributes:
        input: X [R, K] of this shard.
        grad: G [R, N] of this shard.
    """

    input: torch.Tensor
    grad: torch.Tensor


@dataclass
class Observation:
    """One linear on one microbatch. F formats, M tokens, R sampled tokens.

    Attributes:
        microbatch: global index of the microbatch within the step.
        rows: [R] int64, the sampled tokens.
        first: [F, M] FP64, <G_t, eY_t>.
        norms: [5] FP64: |X|^2, |W|^2, |Y|^2, |G|^2, |dW|^2.
        errors: [F, 6] FP64: |Q(X)-X|^2, |Q(W)-W|^2, |Q(G)-G|^2, |eW|^2, |D * eW|^2, <eY, Y>.
        output_error: [F, M] FP64, |eY_t|^2.
        grad: [M] FP64, |G_t|^2.
        couplings: [F, 3, 2] FP64, of fwd^2 over channels, of bwd^2 and of fwd^2 as a whole, times
            eps^2: the parts that `coherence.coherent_square` joins; zeros before the probe.
        scalings: [2, 2] FP64, of scale^2 as a whole and over channels, times eps^2; likewise.
        sketches: [2 + 4 F, WIDTH] FP64, what microbatches have in common (sketch.py): of scale as a
            whole and over channels, then of each format's couplings (all times eps) and D * eW.
        wgrad: [WIDTH] FP64, sketch of this shard's dW; not summed over tensor-parallel ranks.
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
    scalings: torch.Tensor
    sketches: torch.Tensor
    wgrad: torch.Tensor
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
            self.scalings,
            self.sketches,
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
            self.scalings,
            self.sketches,
            self.probe,
        ) = parts

"""What one linear shows on one microbatch, as partial sums that add over tensor-parallel ranks.

A quantity that every tensor-parallel rank holds in full is divided by the group's size, so that
one sum over the group makes every entry right, whichever way the linear is sharded. Products of
two such sums (per token) are formed after that sum, in `reduce.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Observation:
    """One linear on one microbatch. F formats, M tokens, R sampled tokens.

    Attributes:
        microbatch: global index of the microbatch within the step.
        rows: [R] int64, the sampled tokens.
        first: [F] FP64, <G, eY>.
        norms: [5] FP64: |X|^2, |W|^2, |Y|^2, |G|^2, |dW|^2.
        errors: [F, 5] FP64: |Q(X)-X|^2, |Q(W)-W|^2, |Q(G)-G|^2, |eW|^2, |D * eW|^2.
        output_error: [F, M] FP64, |eY_t|^2.
        grad: [M] FP64, |G_t|^2.
        input_gradient_error: [F, R] FP64, |eX_t|^2.
        input_rows: [R, K] of this shard, or None once the probe has used it.
        grad_rows: [R, N] of this shard, likewise.
        probe_grad: [R] FP64, |dG_t|^2 under the probe, or None before it.
        probe_input: [R] FP64, |dX_t|^2 under the probe, or None before it.
    """

    microbatch: int
    rows: torch.Tensor
    first: torch.Tensor
    norms: torch.Tensor
    errors: torch.Tensor
    output_error: torch.Tensor
    grad: torch.Tensor
    input_gradient_error: torch.Tensor
    input_rows: torch.Tensor | None = None
    grad_rows: torch.Tensor | None = None
    probe_grad: torch.Tensor | None = None
    probe_input: torch.Tensor | None = None

    def parts(self) -> list[torch.Tensor]:
        """The tensors that are summed over tensor-parallel ranks, in a fixed order."""
        rows = torch.zeros_like(self.rows, dtype=torch.float64)
        return [
            self.first,
            self.norms,
            self.errors,
            self.output_error,
            self.grad,
            self.input_gradient_error,
            rows if self.probe_grad is None else self.probe_grad,
            rows if self.probe_input is None else self.probe_input,
        ]

    def replace_parts(self, parts: list[torch.Tensor]) -> None:
        """Put summed tensors back, in the order of `parts`."""
        (
            self.first,
            self.norms,
            self.errors,
            self.output_error,
            self.grad,
            self.input_gradient_error,
            self.probe_grad,
            self.probe_input,
        ) = parts

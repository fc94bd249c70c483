"""What microbatches have in common: squares of sums over them that one all-reduce can form.

What quantization does to the updates adds up over the microbatches of a step before it is squared:
a weight's rounding is the same in all of them, that of activations is biased alike. With s_m [C]
the sums over one microbatch's tokens, a value a channel,

    |sum_m s_m|^2 = sum_m |s_m|^2 + across        across = sum_{m != m'} <s_m, s_m'>

The first part is known exactly on every rank. The vectors s_m would be too long to travel, so each
microbatch contributes a sketch of WIDTH numbers, which add over shards, microbatches and ranks:

    z_m = S s_m / sqrt(WIDTH), S [WIDTH, C] random signs:    E <z_m, z_m'> = <s_m, s_m'>
    across ~ |sum_m z_m|^2 - sum_m |z_m|^2

with an error of sqrt(2 / WIDTH) of |sum_m s_m|^2 (0.18 for 64) whatever C and the number of
microbatches are (Alon, Matias, Szegedy, STOC 1996). Rounding noise of different microbatches is
independent and drops out of `across`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_snip.matmul import matmul_fp32
from megatron_snip.streams import channel_signs
from megatron_snip.topology import Placement

WIDTH = 64


@dataclass(frozen=True)
class Signs:
    """Random signs of one linear in one draw, equal in all microbatches.

    Attributes:
        input: [WIDTH, K], of this shard's in_features.
        output: [WIDTH, N], of this shard's out_features.
        whole: [WIDTH, 1], of a sum over all channels.
    """

    input: torch.Tensor
    output: torch.Tensor
    whole: torch.Tensor

    @classmethod
    def of(
        cls, placement: Placement, seed: int, step: int, draw: int, device: torch.device
    ) -> Signs:
        """Draw them; ranks that hold the same channels draw the same signs.

        Args:
            placement: which linear and shard.
            seed: the run's seed.
            step: training step (0-based).
            draw: which of the step's probes.
            device: where.
        """
        return cls(
            *(
                channel_signs(seed, placement, step, draw, axis, WIDTH, device)
                for axis in ("input", "output", "whole")
            )
        )

    def of_matrix(self, matrix: torch.Tensor) -> torch.Tensor:
        """Sketch [N, K] numbers with products of signs, [WIDTH] FP64."""
        rows = matmul_fp32(self.output, matrix)
        result: torch.Tensor = (rows * self.input).sum(1, dtype=torch.float64) / WIDTH**0.5
        return result


def sketch(signs: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Return S s / sqrt(WIDTH), [WIDTH] FP64.

    Args:
        signs: S [WIDTH, C].
        sums: s [C].
    """
    result: torch.Tensor = torch.mv(signs, sums.to(signs.dtype)).double() / WIDTH**0.5
    return result


def own_squares(sketches: torch.Tensor) -> torch.Tensor:
    """Append |z_m|^2 to each sketch of one microbatch: [..., WIDTH] to [..., WIDTH + 1]."""
    return torch.cat([sketches, sketches.square().sum(-1, keepdim=True)], dim=-1)


def across(summed: torch.Tensor) -> torch.Tensor:
    """Return sum_{m != m'} <s_m, s_m'> from sums over m of what `own_squares` gave.

    Args:
        summed: [..., WIDTH + 1].

    Returns:
        [...]; negative where microbatches cancel.
    """
    return summed[..., :-1].square().sum(-1) - summed[..., -1]

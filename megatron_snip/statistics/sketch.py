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
microbatches are (Alon, Matias, Szegedy, STOC 1996); of a matrix, whose signs are products, up to
twice that, the more the closer it is to rank one. Rounding noise of different microbatches is
independent and drops out of `across`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from megatron_snip.matmul import matmul_fp32
from megatron_snip.quantizers import StreamKey
from megatron_snip.streams import channel_signs, channels_of
from megatron_snip.topology import Placement

WIDTH = 64


@dataclass(frozen=True)
class Sketcher:
    """Sketches of one linear in one draw; the same signs in all microbatches.

    Attributes:
        input: S [WIDTH, K], of this shard's in_features.
        output: S [WIDTH, N], of this shard's out_features.
        whole: S [WIDTH], of a sum over all channels: one place, another one in every draw, so that
            its square is exact over draws as well.
        shift: by how many places sketches are rotated, so that experts of a layer, which share a
            row of the table and these signs, do not mix.
    """

    input: torch.Tensor
    output: torch.Tensor
    whole: torch.Tensor
    shift: int = 0

    def of_inputs(self, sums: torch.Tensor) -> torch.Tensor:
        """Sketch s [K], a value an in_feature: [WIDTH] FP64."""
        return self._rotated(torch.mv(self.input, sums.to(self.input.dtype)))

    def of_outputs(self, sums: torch.Tensor) -> torch.Tensor:
        """Sketch s [N], a value an out_feature: [WIDTH] FP64."""
        return self._rotated(torch.mv(self.output, sums.to(self.output.dtype)))

    def of_whole(self, total: torch.Tensor) -> torch.Tensor:
        """Sketch s [1], a sum over all channels: [WIDTH] FP64."""
        return self._rotated(self.whole * total)

    def of_matrix(self, matrix: torch.Tensor) -> torch.Tensor:
        """Sketch [N, K] numbers with products of signs: [WIDTH] FP64."""
        return self._rotated((matmul_fp32(self.output, matrix) * self.input).sum(1))

    def _rotated(self, sums: torch.Tensor) -> torch.Tensor:
        rotated: torch.Tensor = (sums.double() / WIDTH**0.5).roll(self.shift)
        return rotated


class SketchSigns:
    """The signs of one refresh, drawn once for all linears of a width.

    Of a layer's experts, WIDTH share them at different rotations; the next WIDTH have others.
    """

    def __init__(self, seed: int, step: int) -> None:
        """Start without any.

        Args:
            seed: the run's seed.
            step: training step (0-based).
        """
        self._seed, self._step = seed, step
        self._channels: dict[tuple[object, ...], torch.Tensor] = {}
        self._wholes: dict[tuple[object, ...], torch.Tensor] = {}

    def sketcher(self, placement: Placement, draw: int, device: torch.device) -> Sketcher:
        """Return the sketcher of one linear; ranks that hold the same channels agree.

        Args:
            placement: which linear and shard.
            draw: which of the step's probes.
            device: where.
        """
        group, shift = divmod(placement.expert or 0, WIDTH)
        return Sketcher(
            self._of_channels(placement, group, draw, "input", device),
            self._of_channels(placement, group, draw, "output", device),
            self._of_whole(group, draw, device),
            shift,
        )

    def _of_channels(
        self,
        p: Placement,
        group: int,
        draw: int,
        axis: Literal["input", "output"],
        device: torch.device,
    ) -> torch.Tensor:
        features = p.in_features if axis == "input" else p.out_features
        shard = (p.kind, p.tensor.rank, p.tensor.size, p.num_chunks)
        key = (axis, features, shard, group, draw, device)
        if key not in self._channels:
            drawn = channel_signs(self._seed, p, self._step, draw, axis, WIDTH, device, group)
            self._channels[key] = drawn
        return self._channels[key]

    def _of_whole(self, group: int, draw: int, device: torch.device) -> torch.Tensor:
        key = (group, draw, device)
        if key not in self._wholes:
            name = channels_of(group)
            word = StreamKey(self._seed, name, self._step, draw, "sketch.whole").word
            sign = torch.zeros(WIDTH, dtype=torch.float64)
            sign[draw % WIDTH] = WIDTH**0.5 if word & 1 else -(WIDTH**0.5)
            self._wholes[key] = sign.to(device)
        return self._wholes[key]


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

"""Which random numbers a linear's shard uses: the same function of the global tensor everywhere.

Tensor-parallel ranks draw different numbers for the columns that they alone hold and equal ones
for what they all hold, so results do not depend on the layout.
"""

from __future__ import annotations

from typing import Literal

import torch

from megatron_snip.quantizers.stream import StochasticStream, StreamKey, StreamLayout
from megatron_snip.topology import Placement


def grad_output_stream(
    seed: int, placement: Placement, step: int, microbatch: int
) -> StochasticStream:
    """Return the stream of a linear's grad_output [M, N] in one microbatch.

    Args:
        seed: the run's seed.
        placement: which linear and shard; `column` shards the columns of grad_output.
        step: training step (0-based).
        microbatch: global index of the microbatch (over data ranks) within the step.
    """
    layout = StreamLayout()
    if placement.kind == "column":
        layout = _sharded(placement, placement.out_features, placement.num_chunks)
    return StochasticStream(StreamKey(seed, placement.instance, step, microbatch), layout)


def random_signs(
    seed: int, placement: Placement, step: int, draw: int = 0, device: torch.device | None = None
) -> torch.Tensor:
    """Return r = +-1 for every weight of the shard, [N, K] FP32.

    Args:
        seed: the run's seed.
        placement: which linear and shard.
        step: training step (0-based).
        draw: which of the step's probes.
        device: where to draw; the numbers are the same everywhere.
    """
    key = StreamKey(seed, placement.instance, step, draw, "probe")
    local_out, local_in = placement.out_features, placement.in_features
    if placement.kind == "column":
        # Rows of W are sharded; drawing for W^T puts them where streams shard columns.
        layout = _sharded(placement, placement.out_features, placement.num_chunks)
        local_out //= placement.tensor.size
        rows, cols, num_cols = range(local_in), range(local_out), local_out
        bits = StochasticStream(key, layout).bits16(rows, cols, num_cols, device).t()
    else:
        layout = _sharded(placement, placement.in_features, 1)
        local_in //= placement.tensor.size
        rows, cols, num_cols = range(local_out), range(local_in), local_in
        bits = StochasticStream(key, layout).bits16(rows, cols, num_cols, device)
    return _signs(bits)


def channel_signs(
    seed: int,
    placement: Placement,
    step: int,
    draw: int,
    axis: Literal["input", "output"],
    count: int,
    device: torch.device | None = None,
    group: int = 0,
) -> torch.Tensor:
    """Return `count` random signs +-1 for every channel of the shard, [count, channels] FP32.

    They go by the channel's index in the global tensor, and are the same for every linear of a
    group.

    Args:
        seed: the run's seed.
        placement: a linear and shard of this width.
        step: training step (0-based).
        draw: which of the step's probes.
        axis: channels of the input (in_features) or of the output (out_features).
        count: signs a channel, a multiple of 16.
        device: where to draw; the numbers are the same everywhere.
        group: other groups draw other signs.
    """
    sharded = "output" if placement.kind == "column" else "input"
    channels = placement.out_features if axis == "output" else placement.in_features
    layout = StreamLayout()
    if axis == sharded:
        chunks = placement.num_chunks if axis == "output" else 1
        layout = _sharded(placement, channels, chunks)
        channels //= placement.tensor.size
    key = StreamKey(seed, channels_of(group), step, draw, f"sketch.{axis}")
    rows = range(count // 16)
    words = StochasticStream(key, layout).bits16(rows, range(channels), channels, device)
    places = torch.arange(16, device=device, dtype=torch.int16)[:, None]
    return _signs((words[:, None] >> places).reshape(count, channels))


def channels_of(group: int) -> str:
    """Return by which name the channels of a group of linears draw."""
    return f"channels.{group}" if group else "channels"


def _signs(bits: torch.Tensor) -> torch.Tensor:
    return torch.bitwise_and(bits, 1).to(torch.float32).mul_(2).sub_(1)


def _sharded(placement: Placement, features: int, num_chunks: int) -> StreamLayout:
    axis = placement.tensor
    return StreamLayout.shard(features // axis.size, axis.shard, axis.size, num_chunks)

"""Which random numbers a linear's shard uses: the same function of the global tensor everywhere.

Tensor-parallel ranks draw different numbers for the columns that they alone hold and equal ones
for what they all hold, so results do not depend on the layout.
"""

from __future__ import annotations

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


def _sharded(placement: Placement, features: int, num_chunks: int) -> StreamLayout:
    axis = placement.tensor
    return StreamLayout.shard(features // axis.size, axis.shard, axis.size, num_chunks)

"""Which tokens of a microbatch the probe looks at: a fixed random sample.

The sample depends on (seed, step, global microbatch) alone, so that pass A and pass B, all
tensor-parallel ranks and all layouts pick the same tokens.
"""

from __future__ import annotations

import torch

from megatron_snip.quantizers import StreamKey


def sampled_rows(
    num_tokens: int, count: int, seed: int, step: int, microbatch: int
) -> torch.Tensor:
    """Return the indices of the sampled tokens, in random order: any part of them is a sample, too.

    Args:
        num_tokens: M, tokens of the microbatch on one data rank.
        count: tokens wanted; all of them where there are fewer.
        seed: the run's seed.
        step: training step (0-based).
        microbatch: global index of the microbatch (over data ranks) within the step.

    Returns:
        [min(count, num_tokens)], int64, on the CPU.
    """
    word = StreamKey(seed, "", step, microbatch, "sampled rows").word
    generator = torch.Generator().manual_seed(word >> 1)  # a seed has 63 bits
    return torch.randperm(num_tokens, generator=generator)[:count]

"""Which tokens of a microbatch the probe looks at: a fixed random sample.

The sample depends on (seed, step, global microbatch) alone, so that pass A and pass B, all
tensor-parallel ranks and all layouts pick the same tokens.
"""

from __future__ import annotations

import torch


def sampled_rows(
    num_tokens: int, count: int, seed: int, step: int, microbatch: int
) -> torch.Tensor:
    """Return the sorted indices of the sampled tokens.

    Args:
        num_tokens: M, tokens of the microbatch on one data rank.
        count: tokens wanted; all of them where there are fewer.
        seed: the run's seed.
        step: training step (0-based).
        microbatch: global index of the microbatch (over data ranks) within the step.

    Returns:
        [min(count, num_tokens)], int64, on the CPU.
    """
    if count >= num_tokens:
        return torch.arange(num_tokens)
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * 1_000_003 + microbatch)
    return torch.randperm(num_tokens, generator=generator)[:count].sort().values

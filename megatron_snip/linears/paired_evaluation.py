"""What a plan costs now: every evaluation's microbatches run under the plan and again in BF16.

For microbatch i with t_i tokens and x_i = (sum of its token losses under the plan) - (in BF16),

    increase = sum x / sum t        error = sqrt(n / (n - 1) sum (x - increase t)^2) / sum t

over the n microbatches of all data ranks: the standard error of a ratio of means (Cochran, Sampling
Techniques, 1977, 6.4). The pairs share their samples, so the error is that of the difference alone.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core import parallel_state

from megatron_snip.collectives import sum_over
from megatron_snip.linears.runtime import Runtime
from megatron_snip.linears.training_step import (
    ForwardBackward,
    Results,
    TrainingStateSnapshot,
    TrainingStep,
    microbatch_losses,
)


class PairedEvaluation:
    """One evaluation; all ranks make the same calls."""

    def __init__(self, runtime: Runtime) -> None:
        """Nothing was evaluated; `runtime` is the planned linears'."""
        self._runtime = runtime
        self._sums = torch.zeros(6, dtype=torch.float64)

    def run(self, function: ForwardBackward, **kwargs: Any) -> Results:
        """All ranks: return what Megatron's `function` returns under the plan; `kwargs` are its.

        Random numbers, buffers and the data are then as after one call.
        """
        step = TrainingStep(function, kwargs)
        if kwargs.get("collect_non_loss_data") or not kwargs.get("forward_only"):
            return step.run()
        before = TrainingStateSnapshot(step.chunks)
        results = step.run()
        after = TrainingStateSnapshot(step.chunks)
        before.restore()
        with self._runtime.running_in_bf16():
            in_bf16 = step.run()
        after.restore()
        self._add(microbatch_losses(results), microbatch_losses(in_bf16))
        return results

    def increase(self) -> tuple[float, float] | None:
        """All ranks: return the increase per token and its standard error, or None.

        The error is NaN for a single microbatch. None: no rank reported a loss.
        """
        sums = sum_over(self._sums.clone(), self._runtime.topology.control)
        n, x, t, xx, xt, tt = sums.tolist()
        if t <= 0:
            return None
        mean = x / t
        residual = max(xx - 2 * mean * xt + mean**2 * tt, 0.0)
        return mean, math.sqrt(n / (n - 1) * residual) / t if n > 1 else math.nan

    def _add(self, planned: torch.Tensor | None, in_bf16: torch.Tensor | None) -> None:
        if planned is None or in_bf16 is None:
            return
        pairs = torch.stack([planned[:, 0] - in_bf16[:, 0], planned[:, 1]])
        if parallel_state.get_context_parallel_world_size() > 1:  # parts of each sample
            sum_over(pairs, parallel_state.get_context_parallel_group())
        if parallel_state.get_context_parallel_rank() == self._runtime.topology.tensor.rank == 0:
            x, t = pairs.cpu()
            parts = (torch.ones_like(x), x, t, x * x, x * t, t * t)
            self._sums += torch.stack([part.sum() for part in parts])

"""What the current plan costs: an evaluation that runs each microbatch twice."""

import logging
import math
from typing import Any

import torch
from megatron.core import parallel_state

from megatron_snip.collectives import sum_over
from megatron_snip.linears.runtime import Runtime
from megatron_snip.linears.snapshot import TrainingStateSnapshot
from megatron_snip.log import log_failure
from megatron_snip.run.step import (
    ForwardBackward,
    Results,
    TrainingStep,
    microbatch_losses,
    on_device,
)

logger = logging.getLogger(__name__)


class PairedEvaluation:
    """What a plan costs now: an evaluation's microbatches run under the plan and again in BF16.

    For microbatch i with t_i tokens and x_i = (sum of its token losses under the plan) - (in BF16),

        increase = sum x / sum t      error = sqrt(n / (n - 1) sum (x - increase t)^2) / sum t

    over the n microbatches of all data ranks: the standard error of a ratio of means (Cochran,
    Sampling Techniques, 1977, 6.4). The pairs share their samples, so the error is that of the
    difference alone. All ranks make the same calls.
    """

    def __init__(self, runtime: Runtime) -> None:
        """Start without microbatches; `runtime` is that of the planned linears."""
        self._runtime = runtime
        self._sums = torch.zeros(7, dtype=torch.float64)

    def run(self, function: ForwardBackward, **kwargs: Any) -> Results:
        """All ranks: return what Megatron's `function` returns under the plan.

        Afterwards random numbers, buffers and the data are as after one call with `kwargs`.
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
        self._add(results, in_bf16)
        return results

    def increase(self) -> tuple[float, float] | None:
        """All ranks: return the increase per token and its standard error, or None.

        The error is NaN for a single microbatch. None: no rank reported a loss, or one could not
        read its report.
        """
        sums = sum_over(self._sums.clone(), self._runtime.topology.control)
        n, x, t, xx, xt, tt, num_unread = sums.tolist()
        if t <= 0 or num_unread:
            return None
        mean = x / t
        residual = max(xx - 2 * mean * xt + mean**2 * tt, 0.0)
        return mean, math.sqrt(n / (n - 1) * residual) / t if n > 1 else math.nan

    def _add(self, results: Results, in_bf16: Results) -> None:
        unread = 0.0
        try:
            pairs = _paired_losses(results, in_bf16)
        except Exception as error:  # other ranks of the same samples wait for this one
            log_failure(logger, "reading the losses of an evaluation", error)
            unread = 1.0
            pairs = on_device(torch.zeros(2, len(results), dtype=torch.float64))
        if pairs is None:
            return
        if parallel_state.get_context_parallel_world_size() > 1:  # parts of each sample
            sum_over(pairs, parallel_state.get_context_parallel_group())
        if parallel_state.get_context_parallel_rank() == self._runtime.topology.tensor.rank == 0:
            x, t = pairs.cpu()
            parts = (torch.ones_like(x), x, t, x * x, x * t, t * t)
            self._sums[:6] += torch.stack([part.sum() for part in parts])
        self._sums[6] += unread


def _paired_losses(results: Results, in_bf16: Results) -> torch.Tensor | None:
    """Return FP64 [2, microbatches] on the device: loss under the plan minus BF16, and tokens."""
    planned = microbatch_losses(results)
    exact = microbatch_losses(in_bf16)
    if planned is None or exact is None:
        return None
    return torch.stack([planned[:, 0] - exact[:, 0], planned[:, 1]])

"""Evaluations: how each is called, in which precision it runs, and what it shows of the plan.

--snip-eval-precision plan    the plan's precision
                      bf16    BF16
                      both    each microbatch twice, under the plan and again in BF16

Where the plan cannot run the tokens of an evaluation's microbatch (`--eval-micro-batch-size`), the
evaluation runs what the job itself runs.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state

from megatron_snip.collectives import sum_over
from megatron_snip.linears.model import PlannedModel
from megatron_snip.linears.runtime import Runtime
from megatron_snip.linears.snapshot import TrainingStateSnapshot
from megatron_snip.log import log_failure
from megatron_snip.options import Option
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.reporting.events import Reporter
from megatron_snip.run.step import (
    ForwardBackward,
    Results,
    Runner,
    TrainingStep,
    microbatch_losses,
    on_device,
    run_once,
)

logger = logging.getLogger(__name__)


class Evaluations:
    """The evaluations of a run; all ranks call every method together.

    Attributes:
        precision: `--snip-eval-precision`.
        iteration: the iteration that began last.
        iteration_is_open: whether that iteration has not ended yet.
    """

    def __init__(
        self,
        precision: str,
        model: PlannedModel,
        reporter: Reporter,
        predicted: Callable[[PrecisionPlan], float | None],
        iteration: int,
    ) -> None:
        """Start without evaluations.

        Args:
            precision: `--snip-eval-precision`.
            model: the planned linears.
            reporter: what logs the cost of a plan.
            predicted: returns the loss divergence of a plan, or None without measurements.
            iteration: the last iteration that is done.
        """
        self.precision = precision
        self.iteration = iteration
        self.iteration_is_open = False
        self._model = model
        self._reporter = reporter
        self._predicted = predicted
        self._counts: Counter[str] = Counter()  # by name, since the last iteration began
        self._metrics: dict[str, float | None] = {}

    @property
    def run_twice(self) -> bool:
        """Whether an evaluation runs each microbatch under the plan and again in BF16."""
        return self.precision == "both"

    def warn_if_a_plan_cannot_run(self, options: Sequence[Option]) -> None:
        """All ranks: say whether some plans cannot run the tokens of evaluations.

        Args:
            options: what the run's plans may give a linear.
        """
        refusals = [] if self.precision == "bf16" else self._model.evaluation_refusals(options)
        if refusals:
            self._reporter.warn(
                "evaluations run what the job itself runs, and not the plan, while a linear has an "
                f"option that cannot run their tokens: {'; '.join(refusals)}; change "
                "--eval-micro-batch-size to evaluate every plan"
            )

    def begin_iteration(self, iteration: int) -> None:
        """Evaluations from here on belong to an iteration."""
        self.iteration = iteration
        self.iteration_is_open = True
        self._counts.clear()

    def end_iteration(self) -> None:
        """Evaluations from here on come after the iteration."""
        self.iteration_is_open = False

    def next_name(self, of_test_set: bool = False) -> str:
        """Return the name of the evaluation that comes next, and count it.

        `validation` within an iteration, `final_validation` after the last one, `test`; with a
        number from the second of several sets on.
        """
        if of_test_set:
            name = "test"
        elif self.iteration_is_open:
            name = "validation"
        else:
            name = "final_validation"
        self._counts[name] += 1
        number = self._counts[name]
        return name if number == 1 else f"{name}_{number}"

    @contextmanager
    def running(self, name: str, plan: PrecisionPlan) -> Iterator[Runner]:
        """All ranks: the context in which an evaluation runs.

        Args:
            name: the evaluation's name in the log and in metrics.
            plan: the current plan.

        Yields:
            What to call in place of Megatron's forward-backward function, which is its first
            argument.
        """
        if self.precision == "bf16":
            with self._model.runtime.running_in_bf16():
                yield run_once
        elif self._model.evaluation_refusals():
            with self._model.running_as_job():
                yield run_once
        elif self.run_twice:
            paired = PairedEvaluation(self._model.runtime)
            yield paired.run
            self._report_increase(name, plan, paired)
        else:
            yield run_once

    def take_metrics(self) -> dict[str, float | None]:
        """Return what evaluations showed since this was asked last, by the metric's name."""
        metrics = self._metrics
        self._metrics = {}
        return metrics

    def _report_increase(self, name: str, plan: PrecisionPlan, paired: "PairedEvaluation") -> None:
        """All ranks: log what a plan costs an evaluation, and keep it for the next report."""
        found = paired.reduce()
        if found is None:
            return
        increase, error = found
        predicted = self._predicted(plan)
        # The validation of an iteration is the usual one; its metrics have no name of their own.
        is_usual = name == "validation"
        prefix = "eval/" if is_usual else f"eval/{name}_"
        self._metrics[f"{prefix}loss_increase"] = increase
        self._metrics[f"{prefix}loss_increase_error"] = error
        self._metrics[f"{prefix}loss_divergence"] = predicted
        kind = "evaluation" if is_usual else f"{name.replace('_', ' ')} evaluation"
        text = f"{increase:+.4g} +- {error:.2g} nat a token against bf16"
        if predicted is not None:
            text += f", loss divergence of the plan {predicted:.4g}"
        self._reporter.log(f"iteration {self.iteration}: {kind} under {plan.label}: {text}")


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
        # This rank's n, sum x, sum t, sum x^2, sum x t, sum t^2, and reports that it cannot read.
        self._sums = torch.zeros(7, dtype=torch.float64)

    def run(self, function: ForwardBackward, **kwargs: Any) -> Results:
        """All ranks: return what Megatron's `function` returns under the plan.

        Afterwards random numbers, buffers and the data are as after one call with `kwargs`.
        """
        if kwargs.get("collect_non_loss_data") or not kwargs.get("forward_only"):
            return function(**kwargs)
        step = TrainingStep(function, kwargs)
        before = TrainingStateSnapshot(step.chunks)
        results = step.run()
        after = TrainingStateSnapshot(step.chunks)
        before.restore()
        with self._runtime.running_in_bf16():
            in_bf16 = step.run()
        after.restore()
        self._add(results, in_bf16)
        return results

    def reduce(self) -> tuple[float, float] | None:
        """All ranks: return the increase per token and its standard error, or None.

        The error is NaN for a single microbatch. None: no rank reported a loss, or one could not
        read its report.
        """
        sums = self._runtime.topology.control.sum_(self._sums.clone())
        n, x, t, xx, xt, tt, num_unread = sums.tolist()
        if t <= 0 or num_unread:
            return None
        increase = x / t
        # The square, multiplied out: sums over ranks need no second pass. Rounding may make it
        # slightly negative.
        residual = max(xx - 2 * increase * xt + increase**2 * tt, 0.0)
        error = math.sqrt(n / (n - 1) * residual) / t if n > 1 else math.nan
        return increase, error

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
        context_rank = parallel_state.get_context_parallel_rank()
        tp_rank = self._runtime.topology.tp.rank
        if context_rank == 0 and tp_rank == 0:  # one of the ranks that share the samples
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

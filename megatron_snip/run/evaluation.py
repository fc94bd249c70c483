"""Evaluations: how each is called, in which precision it runs, and what it shows of the plan.

--snip-eval-precision plan    the plan's precision
                      bf16    BF16
                      both    each microbatch twice, under the plan and again in BF16
                      groups  as `both`, and again with each group of linears in BF16

Where the plan cannot run the tokens of an evaluation's microbatch (`--eval-micro-batch-size`), the
evaluation runs what the job itself runs.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state

from megatron_snip.collectives import sum_over
from megatron_snip.linears.model import PlannedModel
from megatron_snip.linears.runtime import Runtime
from megatron_snip.linears.snapshot import TrainingStateSnapshot
from megatron_snip.log import log_failure
from megatron_snip.options import BF16, Option
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
from megatron_snip.types import split_linear_name

logger = logging.getLogger(__name__)

EVERYTHING = "everything"
"""The variant of an evaluation with all linears in BF16."""

KINDS = ("attention", "mlp", "experts", "mamba", "others")
"""Groups by what a linear belongs to; each linear is in one of them."""

THIRDS = ("first_third", "middle_third", "last_third")
"""Groups by layer, in the model's order; each linear is in one of them."""

Increase = tuple[float, float]
"""A loss increase per token, and its standard error."""


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
        self._groups: dict[str, frozenset[str]] = {}
        if precision == "groups":
            self._groups = linear_groups(linear.name for linear in model.job.linears)
        self._counts: Counter[str] = Counter()  # by name, since the last iteration began
        self._metrics: dict[str, float | None] = {}

    @property
    def repeats_microbatches(self) -> bool:
        """Whether an evaluation runs each microbatch under the plan and again in BF16."""
        return self.precision in ("both", "groups")

    def log_cost(self) -> None:
        """Log how often an evaluation runs each microbatch, if it is for each group of linears."""
        if self._groups:
            self._reporter.log(
                f"evaluations run each microbatch up to {2 + len(self._groups)} times: under the "
                f"plan, in bf16, and with one group of linears in bf16 ({', '.join(self._groups)})"
            )

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
        elif self.repeats_microbatches:
            paired = PairedEvaluation(self._model.runtime, self._variants(plan))
            yield paired.run
            self._report_increase(name, plan, paired)
        else:
            yield run_once

    def take_metrics(self) -> dict[str, float | None]:
        """Return what evaluations showed since this was asked last, by the metric's name."""
        metrics = self._metrics
        self._metrics = {}
        return metrics

    def _variants(self, plan: PrecisionPlan) -> dict[str, frozenset[str] | None]:
        """Return which linears run in BF16 in each further run of a microbatch; None: all.

        Groups whose run would be that of the plan, or the one with all linears in BF16, are left
        out.
        """
        low = {name for name, option in plan.linears.items() if option != BF16}
        variants: dict[str, frozenset[str] | None] = {EVERYTHING: None}
        for group, names in self._groups.items():
            if names & low and not low <= names:
                variants[group] = names
        return variants

    def _report_increase(self, name: str, plan: PrecisionPlan, paired: "PairedEvaluation") -> None:
        """All ranks: log what a plan costs an evaluation, and keep it for the next report."""
        found = paired.reduce()
        if found is None:
            return
        increase, error = found[EVERYTHING]
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
            text += f", loss divergence of the plan {predicted:.4g} (a score)"
        self._reporter.log(f"iteration {self.iteration}: {kind} under {plan.label}: {text}")
        if self._groups:
            self._report_groups(prefix, kind, plan, found)

    def _report_groups(
        self, prefix: str, kind: str, plan: PrecisionPlan, found: Mapping[str, Increase]
    ) -> None:
        """Log how much of a loss increase each group of linears has, and keep it."""
        low = {name for name, option in plan.linears.items() if option != BF16}
        texts = []
        for groups in (KINDS, THIRDS):
            parts = []
            for group in groups:
                if group not in self._groups:
                    continue
                is_everything = low <= self._groups[group]
                own = found[EVERYTHING] if is_everything else found.get(group, (0.0, 0.0))
                self._metrics[f"{prefix}increase_of/{group}"] = own[0]
                self._metrics[f"{prefix}increase_of/{group}_error"] = own[1]
                parts.append(f"{group.replace('_', ' ')} {own[0]:+.4g} +- {own[1]:.2g}")
            texts.append(", ".join(parts))
        self._reporter.log(f"iteration {self.iteration}: {kind}: of this {'; '.join(texts)}")


class PairedEvaluation:
    """What a plan costs now: an evaluation's microbatches run under it and again in its variants.

    In a variant some linears run in BF16, or all. For microbatch i with t_i tokens and
    x_i = (sum of its token losses under the plan) - (in the variant),

        increase = sum x / sum t      error = sqrt(n / (n - 1) sum (x - increase t)^2) / sum t

    over the n microbatches of all data ranks: the standard error of a ratio of means (Cochran,
    Sampling Techniques, 1977, 6.4). The pairs share their samples, so the error is that of the
    difference alone. All ranks make the same calls.
    """

    def __init__(self, runtime: Runtime, variants: Mapping[str, frozenset[str] | None]) -> None:
        """Start without microbatches.

        Args:
            runtime: that of the planned linears.
            variants: names of the linears that run in BF16 in each variant; None: all.
        """
        self._runtime = runtime
        self._variants = dict(variants)
        # This rank's n, sum x, sum t, sum x^2, sum x t, sum t^2, and reports that it cannot read,
        # of each variant.
        self._sums = torch.zeros(len(variants), 7, dtype=torch.float64)

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
        for names, sums in zip(self._variants.values(), self._sums, strict=True):
            before.restore()
            with self._runtime.running_in_bf16(names):
                again = step.run()
            self._add(sums, results, again)
        after.restore()
        return results

    def reduce(self) -> dict[str, Increase] | None:
        """All ranks: return the increase per token and its standard error, by variant.

        The error is NaN for a single microbatch. None: no rank reported a loss, or one could not
        read its report.
        """
        all_sums = self._runtime.topology.control.sum_(self._sums.flatten())
        found = {}
        for variant, sums in zip(self._variants, all_sums.view(-1, 7).tolist(), strict=True):
            n, x, t, xx, xt, tt, num_unread = sums
            if t <= 0 or num_unread:
                return None
            increase = x / t
            # The square, multiplied out: sums over ranks need no second pass. Rounding may make it
            # slightly negative.
            residual = max(xx - 2 * increase * xt + increase**2 * tt, 0.0)
            error = math.sqrt(n / (n - 1) * residual) / t if n > 1 else math.nan
            found[variant] = increase, error
        return found

    def _add(self, sums: torch.Tensor, results: Results, again: Results) -> None:
        """Add a variant's microbatches to its sums."""
        unread = 0.0
        try:
            planned = microbatch_losses(results)
            varied = microbatch_losses(again)
            if planned is None or varied is None:
                return
            # FP64 [2, microbatches] on the device: loss increase over the variant, and tokens.
            pairs = torch.stack([planned[:, 0] - varied[:, 0], planned[:, 1]])
        except Exception as error:  # other ranks of the same samples wait for this one
            log_failure(logger, "reading the losses of an evaluation", error)
            unread = 1.0
            pairs = on_device(torch.zeros(2, len(results), dtype=torch.float64))
        if parallel_state.get_context_parallel_world_size() > 1:  # parts of each sample
            sum_over(pairs, parallel_state.get_context_parallel_group())
        context_rank = parallel_state.get_context_parallel_rank()
        tp_rank = self._runtime.topology.tp.rank
        if context_rank == 0 and tp_rank == 0:  # one of the ranks that share the samples
            x, t = pairs.cpu()
            parts = (torch.ones_like(x), x, t, x * x, x * t, t * t)
            sums[:6] += torch.stack([part.sum() for part in parts])
        sums[6] += unread


def linear_groups(names: Iterable[str]) -> dict[str, frozenset[str]]:
    """Return the linears of each group, without empty groups.

    Args:
        names: all linears, in the model's order.
    """
    names = list(names)
    layers = list(dict.fromkeys(split_linear_name(name)[:2] for name in names))
    groups: dict[str, list[str]] = {group: [] for group in (*KINDS, *THIRDS)}
    for name in names:
        groups[_kind(name)].append(name)
        index = layers.index(split_linear_name(name)[:2])
        groups[THIRDS[3 * index // len(layers)]].append(name)
    return {group: frozenset(members) for group, members in groups.items() if members}


def _kind(name: str) -> str:
    parts = name.split(".")
    if "experts" in parts:
        return "experts"
    # `self_attention`, `cross_attention`; in MTP they are below the layer.
    if any(part.endswith("attention") for part in parts):
        return "attention"
    if "mixer" in parts:
        return "mamba"
    return "mlp" if "mlp" in parts else "others"

"""Observing: from training iterations to statistics, divergences and a planning problem.

run            a measured iteration: the forward and backward of the linears are observed while it
               runs, and ranks add up what they saw
mean_with      the running mean of the statistics, with what was measured
problem        statistics -> divergences -> planning problem
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from megatron_snip.collectives import RemoteFailure
from megatron_snip.config import SnipConfig
from megatron_snip.divergence.quality_loss import (
    DivergenceTable,
    divergence_table,
    planning_problem,
)
from megatron_snip.errors import PlanningError
from megatron_snip.formats import lowest_precision
from megatron_snip.linears.availability import AvailableOptions
from megatron_snip.linears.model import PlannedModel
from megatron_snip.linears.moe_dispatch import ExpertDispatch
from megatron_snip.linears.snapshot import TrainingStateSnapshot
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.planning.problem import PlanningProblem
from megatron_snip.run.guard import Outcome
from megatron_snip.run.step import (
    StepLoss,
    TrainingStep,
    prepare_next_pass,
    tolerating_non_finite,
)
from megatron_snip.statistics.gradients import gradient_norms
from megatron_snip.statistics.health_table import HealthTable
from megatron_snip.statistics.observer import StepObserver
from megatron_snip.statistics.records import StatisticsTable, running_mean
from megatron_snip.statistics.sample import MeasureSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Refresh:
    """What a measured iteration gave.

    Attributes:
        table: its statistics, or None if it failed.
        health: of the iteration.
        seconds: that measuring added (`StepObserver.seconds`).
        failure: why it could not be measured; "" if it was.
    """

    table: StatisticsTable | None = None
    health: HealthTable = field(default_factory=lambda: HealthTable(0, ()))
    seconds: float = 0.0
    failure: str = ""


class Observations:
    """How a run measures; all ranks call every method together.

    What was measured so far (`mean`, the running mean of the statistics) is the caller's.
    """

    def __init__(
        self, config: SnipConfig, model: PlannedModel, available: AvailableOptions, optimizer: Any
    ) -> None:
        """Prepare to measure.

        Args:
            config: the settings.
            model: the planned linears.
            available: the options that the linears can run.
            optimizer: Megatron's optimizer.
        """
        self._config = config
        self._model = model
        self._available = available
        names = {name for option in available.options for name in option.formats}
        self._formats = tuple(name for name in config.named_formats if name in names)
        self._optimizer = optimizer
        self._topology = model.runtime.topology
        self._dispatch = ExpertDispatch(model.chunks, self._topology)

    def run(
        self, iteration: int, step: TrainingStep, run: Callable[[], Outcome]
    ) -> tuple[Outcome, Refresh]:
        """All ranks: run a step that is measured; return how it ended and what was measured.

        Args:
            iteration: the iteration that runs.
            step: its forward-backward call.
            run: runs the step.

        Returns:
            The outcome, and the refresh: on every rank one that failed, if a rank failed to measure
            or the guard ran the step again.
        """
        settings = MeasureSettings(
            self._model.measured_formats(self._formats),
            iteration,
            self._model.runtime.seed,
            num_experts=self._model.job.num_experts,
        )
        dispatch = self._dispatch
        observer = StepObserver(settings, self._topology, dispatch.rows_by_sender)
        if self._model.job.ties:
            self.observe_unfused(observer, iteration, step)
            outcome = run()
        else:
            with dispatch.counting(), self._model.runtime.observed_by(observer):
                outcome = run()

        loss = outcome.loss or StepLoss(outcome.results, self._topology)
        loss_part = loss.part()
        loss_scale = step.loss_scale()
        # `table` calls it, and turns an error of this rank into one of all ranks.
        norms = partial(
            gradient_norms, self._model.weights(), self._optimizer, self._topology, loss_scale
        )
        try:
            table, health = observer.table(
                self._model.job.linears,
                step.grad_scale(self._topology, loss_scale),
                None,
                norms,
                also_summed=loss_part,
            )
        except RemoteFailure as failure:
            return outcome, Refresh(failure=str(failure))
        # `table` comes first: if measuring failed as well, that is the reason to report. The
        # observer may have added up several runs.
        if outcome.num_runs > 1:
            return outcome, Refresh(failure="the guard ran this iteration again")
        table = replace(table, loss=loss.take(loss_part))
        return outcome, Refresh(table, health, observer.seconds)

    def observe_unfused(self, observer: StepObserver, iteration: int, step: TrainingStep) -> None:
        """All ranks: observe an unfused forward-backward, where MLPs run fused operations.

        Fused MLPs do not call their linears, so the step itself cannot be observed. What the
        additional run changes is undone.

        Args:
            observer: what the linears call in their forward and backward.
            iteration: the iteration that is about to run.
            step: its forward-backward call.
        """
        begin = time.perf_counter()
        before = TrainingStateSnapshot(step.chunks)
        runtime = self._model.runtime
        with (
            self._dispatch.counting(),
            runtime.observed_by(observer),  # only fused MLPs change: they run unfused
            tolerating_non_finite(),  # such results are left to the pass that counts
            runtime.training_pass(iteration),
        ):
            step.run()
        before.restore()
        prepare_next_pass(step.chunks, self._optimizer)
        observer.seconds = time.perf_counter() - begin

    def mean_with(self, mean: StatisticsTable | None, refresh: Refresh) -> StatisticsTable:
        """Return the running mean with a refresh; the same on all ranks.

        Args:
            mean: the running mean so far; None before the first refresh.
            refresh: what a measured iteration gave.

        Raises:
            PlanningError: with the reason, if it was not measured.
        """
        if refresh.table is None:
            raise PlanningError(refresh.failure)
        return running_mean(mean, refresh.table, self._config.stat_decay)

    def suffice(self, mean: StatisticsTable | None) -> bool:
        """Whether the linears were measured in every format of the options: enough for a plan.

        Linears that no measurement reached may lack them: frozen first layers, and experts that got
        no tokens.
        """
        if mean is None:
            return False
        names = {linear.name for linear in mean.linears}
        if names != {linear.name for linear in self._model.job.linears}:
            return False
        needed = {name for option in self._available.options for name in option.formats} - {"bf16"}
        measured = [set(row.formats) for row in mean.linears if row.microbatches]
        return bool(measured) and all(needed <= formats for formats in measured)

    def problem(
        self, mean: StatisticsTable, target: float
    ) -> tuple[DivergenceTable, PlanningProblem]:
        """Return what measurements amount to: divergences, and a planning problem.

        Args:
            mean: the running mean of the statistics.
            target: the efficiency target of the problem.
        """
        divergences = self._divergences(mean, warn=self._topology.rank == 0)
        return divergences, self._available.restrict(planning_problem(divergences, target))

    def loss_divergence(self, mean: StatisticsTable | None, plan: PrecisionPlan) -> float | None:
        """Return a plan's loss divergence by the measurements so far; None without any."""
        if mean is None:
            return None
        return self._divergences(mean, warn=False).loss_divergence(plan.linears)

    def _divergences(self, mean: StatisticsTable, warn: bool) -> DivergenceTable:
        # `_formats` has only formats that some linear can run. So `lowest` may be another format
        # than `config.lowest_format`, but both have the same number of bits: `available_options`
        # refuses a run in which no linear can run a format of that many bits.
        lowest = lowest_precision(self._formats).name
        available = self._available
        return divergence_table(
            mean,
            available.options,
            lowest,
            self._config,
            available.refusals,
            available.fixed,
            warn,
            available.job.options,
        )

"""A refresh: observes training iterations, and makes a planning problem from the statistics.

an observed iteration    a part of the linears is measured while it runs (statistics/observer)
its end                  all-reduces; the running mean of the statistics is updated
after the last part      statistics -> divergences -> planning problem
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from megatron_snip.collectives import RemoteFailure, any_rank
from megatron_snip.config import SnipConfig
from megatron_snip.divergence.quality_loss import (
    DivergenceTable,
    divergence_table,
    planning_problem,
)
from megatron_snip.formats import lowest_precision
from megatron_snip.linears.availability import AvailableOptions
from megatron_snip.linears.model import PlannedModel
from megatron_snip.linears.moe_dispatch import ExpertDispatch
from megatron_snip.linears.training_step import Results, StepLoss, TrainingStep
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.planning.policies import get_policy
from megatron_snip.reporting.events import Measurement
from megatron_snip.state import ControllerState
from megatron_snip.statistics.health_table import HealthTable, LinearHealth
from megatron_snip.statistics.observer import StepObserver
from megatron_snip.statistics.optimizer_state import (
    gather_sensitivities,
    steps_of_moments,
    weight_norms,
)
from megatron_snip.statistics.records import running_mean
from megatron_snip.statistics.sample import MeasureSettings

logger = logging.getLogger(__name__)

MIN_OPTIMIZER_STEPS = 10
"""Statistics use AdamW's second moment, which means little after fewer steps."""


class Schedule:
    """Which iterations measure what; the same on all ranks.

    A refresh that begins at iteration i observes iterations i, i + 1, ..., each of which measures
    one of `num_parts` parts of the linears.

    Attributes:
        static: the policy needs no statistics, so it plans before the first iteration.
        replans: refreshes or changes of the target lead to plans.
        num_parts: iterations that one refresh observes.
        refreshed: the first iteration of the last refresh that began, or None.
        waiting: a refresh is due and waits until `may_measure` allows it.
    """

    def __init__(
        self,
        config: SnipConfig,
        may_measure: Callable[[int], bool],
        refreshed: int | None = None,
    ) -> None:
        """Start, or continue after the refresh that began at iteration `refreshed`.

        Args:
            config: the settings.
            may_measure: asked, with the iteration, before a refresh that is due begins.
            refreshed: see above.
        """
        self._may_measure = may_measure
        self.waiting = False
        self.static = not get_policy(config.policy).needs_statistics
        self.replans = not config.collect_only and (config.has_schedule or not self.static)
        self.num_parts = config.num_measuring
        self.refreshed = refreshed
        self._config = config
        self._measured: int | None = None

    def part(self, iteration: int, wanted_at: int | None, may_begin: bool) -> int | None:
        """Return which part of the linears an iteration measures; None for none.

        Args:
            iteration: the iteration that is about to run.
            wanted_at: an iteration at which a refresh is wanted out of turn, or None.
            may_begin: whether a refresh may begin.
        """
        if iteration == self._measured:  # Megatron repeats an iteration whose result it doubts
            return None
        if may_begin and self._is_due(iteration, wanted_at):
            self.waiting = not self._may_measure(iteration)
            if not self.waiting:
                self.refreshed = iteration
        part = self._part(iteration)
        self._measured = iteration if part is not None else self._measured
        return part

    def may_replan(self, iteration: int) -> bool:
        """Whether a new target may be planned for: no refresh begins before the plan is due."""
        c = self._config
        is_near = (c.start_step - iteration - 1) % c.interval + 1 < c.lag or self.waiting
        return self.replans and c.has_schedule and (self.static or not is_near)

    def _part(self, iteration: int) -> int | None:
        """Return the part of the refresh that began last; None after its end."""
        part = -1 if self.refreshed is None else iteration - self.refreshed
        return part if 0 <= part < self.num_parts else None

    def _is_due(self, iteration: int, wanted_at: int | None) -> bool:
        c = self._config
        never = self.static and not c.collect_only
        if never or iteration < c.start_step or self._part(iteration) is not None:
            return False
        on_time = (iteration - c.start_step) % c.interval == 0
        return self.waiting or iteration == wanted_at or on_time


class Refresher:
    """Measures a model in training; all ranks call every method together.

    Attributes:
        mean: running mean of the statistics, or None before the first measurement.
        schedule: which iterations measure what.
        failure: why a part of the current refresh was not measured; the same on all ranks.
    """

    def __init__(
        self,
        config: SnipConfig,
        model: PlannedModel,
        available: AvailableOptions,
        optimizer: Any,
        state: ControllerState | None,
    ) -> None:
        """Measure `model` with the available options; continue from `state`."""
        self.mean = None if state is None else state.statistics
        refreshed = None if state is None else state.refreshed
        self.schedule = Schedule(config, self._may_measure, refreshed)
        self._config = config
        self._model = model
        self._available = available
        names = {name for option in available.options for name in option.formats}
        self._formats = tuple(name for name in config.formats if name in names)
        self._optimizer = optimizer
        self._topology = model.runtime.topology
        self._dispatch = ExpertDispatch(model.chunks, self._topology)
        self._seconds = 0.0
        self.failure: str | None = None
        self._health: dict[str, LinearHealth] = {}

    def measure(
        self,
        iteration: int,
        part: int,
        training: TrainingStep,
        run: Callable[[], tuple[Results, bool]],
    ) -> Results:
        """Run a training iteration and measure a part of the linears.

        Args:
            iteration: the iteration.
            part: which part of the linears to measure.
            training: the iteration's forward-backward call.
            run: runs it; returns its results, and False if it had to run twice.
        """
        if part == 0:
            self._seconds, self.failure, self._health = 0.0, None, {}
        linears, topology, optimizer = self._model.all_linears, self._topology, self._optimizer
        names = frozenset(linear.name for linear in linears[part :: self.schedule.num_parts])
        try:
            weights = self._model.weights(names)
            sensitivities = gather_sensitivities(weights, optimizer, topology)
        except RemoteFailure as failure:
            self.failure = self.failure or str(failure)
            return run()[0]
        formats = self._model.measured_formats(self._formats)
        settings = MeasureSettings(formats, iteration, self._model.runtime.seed, names)
        observer = StepObserver(settings, topology, sensitivities, self._dispatch.rows_by_sender)
        with self._dispatch.counting(), self._model.runtime.observed_by(observer):
            results, ran_once = run()
        loss = StepLoss(results, topology).value()
        try:
            scale, loss_scale = training.grad_scale(topology), training.loss_scale()
            norms = partial(weight_norms, weights, optimizer, sensitivities, topology, loss_scale)
            table, health = observer.table(linears, scale, loss, norms)
        except RemoteFailure as failure:
            self.failure = self.failure or str(failure)
            return results
        if ran_once:
            self._seconds += observer.seconds
            self.mean = running_mean(self.mean, table, self._config.stat_decay)
            self._health |= {linear.name: linear for linear in health.linears}
        else:
            self.failure = self.failure or "the guard ran this iteration twice"
        return results

    @property
    def is_measured(self) -> bool:
        """Whether the measurements so far have every linear in every format of the options."""
        if self.mean is None:
            return False
        needed = {name for option in self._available.options for name in option.formats} - {"bf16"}
        names = {linear.name for linear in self.mean.linears}
        seen = [set(row.formats) for row in self.mean.linears if row.microbatches]
        is_model = names == {linear.name for linear in self._model.all_linears}
        return is_model and bool(seen) and all(needed <= formats for formats in seen)

    def measurement(self, target: float) -> Measurement:
        """Return divergences, and the planning problem at `target`, of the measurements so far."""
        divergences = self._divergences(warn=self._topology.rank == 0)
        problem = self._available.restrict(planning_problem(divergences, target))
        table = divergences.statistics
        linears = (self._health.get(linear.name) for linear in table.linears)
        health = HealthTable(table.iteration, tuple(each for each in linears if each))
        return Measurement(divergences, problem, self._seconds, health)

    def loss_divergence(self, plan: PrecisionPlan) -> float | None:
        """Return a plan's loss divergence by the measurements so far; None without any."""
        if self.mean is None:
            return None
        return self._divergences(warn=False).loss_divergence(plan.linears)

    def _divergences(self, warn: bool) -> DivergenceTable:
        assert self.mean is not None, "something was measured"
        # If no linear can run the lowest format, another with as few bits stands in.
        lowest = lowest_precision(self._formats).name
        return divergence_table(self.mean, self._available.options, lowest, self._config, warn)

    def _may_measure(self, iteration: int) -> bool:
        """All ranks: whether AdamW's moments have seen enough steps on every rank."""
        steps = steps_of_moments(self._optimizer)
        young = any_rank(steps is not None and steps < MIN_OPTIMIZER_STEPS, self._topology.control)
        if young and not self.schedule.waiting and self._topology.rank == 0:
            logger.info(
                "snip: iteration %d: measuring waits until the optimizer has made %d steps",
                iteration,
                MIN_OPTIMIZER_STEPS,
            )
        return not young

"""Refresher: observes training iterations, and makes a planning problem of what they show.

a training iteration      a part of the linears is observed while it runs (statistics/observer.py)
its end                   one all-reduce; statistics join their running mean
after the last part       statistics -> divergences -> problem, cut to what each linear can run
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_snip.collectives import RemoteFailure
from megatron_snip.config import SnipConfig
from megatron_snip.cycle.offer import Offer
from megatron_snip.divergence.quality import QualitySettings, divergence_table, planning_problem
from megatron_snip.linears.model import PlannedModel
from megatron_snip.linears.moe_dispatch import ExpertDispatch
from megatron_snip.linears.step_loss import StepLoss
from megatron_snip.linears.training_step import TrainingStep
from megatron_snip.reporting.reporter import Refresh
from megatron_snip.statistics.observer import MeasureSettings, StepObserver
from megatron_snip.statistics.records import StatisticsTable, running_mean
from megatron_snip.statistics.sensitivity import gather_sensitivities
from megatron_snip.topology import Topology

Results = list[dict[str, Any]]


class Refresher:
    """Measures a model in training; all ranks call every method together.

    Attributes:
        mean: running mean of the statistics, or None before the first measurement.
    """

    def __init__(
        self,
        config: SnipConfig,
        model: PlannedModel,
        optimizer: Any,
        topology: Topology,
        offer: Offer,
        num_parts: int,
        mean: StatisticsTable | None,
    ) -> None:
        """Args are the settings, what is measured in how many parts, and the mean so far."""
        self.mean = mean
        self._config = config
        self._model = model
        self._optimizer = optimizer
        self._topology = topology
        self._offer = offer
        self._num_parts = num_parts
        self._dispatch = ExpertDispatch(model.chunks, topology)
        self._seconds = 0.0

    def measure(
        self, step: int, part: int, training: TrainingStep, run: Callable[[], tuple[Results, bool]]
    ) -> tuple[Results, str | None]:
        """Run a training iteration, observed.

        Args:
            step: training step (0-based).
            part: which part of the linears to measure.
            training: the iteration's forward-backward call.
            run: runs it; returns its results, and False if it had to be run twice.

        Returns:
            The iteration's results, and why nothing was measured, the same on all ranks.
        """
        c = self._config
        if part == 0:
            self._seconds = 0.0
        linears = self._model.all_linears
        names = frozenset(linear.name for linear in linears[part :: self._num_parts])
        on_offer = {name for option in self._offer.options for name in option.formats}
        formats = tuple(name for name in c.formats if name != "bf16" and name in on_offer)
        try:
            weights = self._model.weights(names)
            sensitivities = gather_sensitivities(weights, self._optimizer, self._topology)
        except RemoteFailure as failure:
            return run()[0], str(failure)
        settings = MeasureSettings(formats, step, c.seed, names)
        observer = StepObserver(settings, self._topology, sensitivities, self._dispatch.parts)
        with self._dispatch.counting(), self._model.runtime.observed_by(observer):
            results, ran_once = run()
        loss = StepLoss(results, self._topology).value()
        try:
            table = observer.table(linears, training.grad_scale(self._topology), loss)
        except RemoteFailure as failure:
            return results, str(failure)
        if not ran_once:
            return results, "the loss guard ran this iteration twice"
        self._seconds += observer.seconds
        self.mean = running_mean(self.mean, table, c.stat_decay)
        return results, None

    def refresh(self, step: int) -> Refresh:
        """Return what the measurements so far say of every option, as a problem for the solver."""
        assert self.mean is not None, "something was measured"
        c, options, lowest = self._config, self._offer.options, self._offer.lowest_format
        quality = QualitySettings(options, lowest, c.loss_join, c.weight_lambda)
        divergences = divergence_table(self.mean, quality, warn=self._topology.rank == 0)
        problem = self._offer.restricted(planning_problem(divergences, lowest, c.efficiency_target))
        return Refresh(step, self.mean, divergences, problem, self._seconds)

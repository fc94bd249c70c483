"""Refresher: one refresh's measurement, as a problem for the solver, or as nothing on all ranks.

    pass A, pass B, one reduction    statistics/refresh.py
    statistics -> divergences        divergence/quality.py
    divergences -> problem           cut to what each linear can run

Where memory runs out, what was held is freed and it is tried once more with less; whatever else
fails, this refresh is given up.
"""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from megatron_snip.collectives import RemoteFailure, attempt
from megatron_snip.config import SnipConfig
from megatron_snip.cycle.agreement import Agreement
from megatron_snip.cycle.announcer import Announcer
from megatron_snip.cycle.offer import Offer
from megatron_snip.divergence.quality import QualitySettings, divergence_table, problem_dict
from megatron_snip.errors import SnipError
from megatron_snip.linears.careful import CarefulPasses, out_of_memory
from megatron_snip.linears.model import PlannedModel
from megatron_snip.linears.passes import MeasuringPasses, TrainingPass
from megatron_snip.reporting.reporter import Refresh
from megatron_snip.statistics.recorder import MeasureSettings
from megatron_snip.statistics.refresh import RefreshInputs, measure
from megatron_snip.topology import Topology

FEWER = 4
"""A refresh that runs out of memory is tried again with this part of microbatches and rows."""


class RefreshFailure(SnipError):
    """A refresh came to nothing, on every rank; weights and training are as before."""


class Refresher:
    """Measures a model under training; all ranks call every method together."""

    def __init__(
        self,
        config: SnipConfig,
        model: PlannedModel,
        optimizer: Any,
        topology: Topology,
        offer: Offer,
        agreement: Agreement,
        announcer: Announcer,
    ) -> None:
        """Args are the settings, what is measured, and who has a say in it."""
        self._config = config
        self._model = model
        self._optimizer = optimizer
        self._topology = topology
        self._offer = offer
        self._agreement = agreement
        self._announcer = announcer

    def refresh(self, step: int, training: TrainingPass) -> Refresh:
        """Measure, with less where memory runs out.

        Args:
            step: training step (0-based).
            training: the step's forward-backward call; it leaves no trace in it.

        Raises:
            RefreshFailure: the same on every rank, if that came to nothing.
            StrandedError: on a rank whose peers cannot be helped.
        """
        begin = time.perf_counter()
        for parts in (1, FEWER):
            try:
                return self._agreement.together(
                    partial(self._measured, step, training, begin, parts)
                )
            except RemoteFailure as failure:
                why, again = str(failure), out_of_memory(failure.failures.values())
            # Out of the handler, so that the failed attempt's tensors have no owner left.
            _free_memory()
            if not again:
                break
            if parts == 1:
                self._announcer.warn(
                    f"the refresh at step {step} ran out of memory ({why}); trying once more "
                    f"with 1/{FEWER} of its microbatches and sampled rows"
                )
        raise RefreshFailure(f"the refresh at step {step} was given up: {why}")

    def _measured(self, step: int, training: TrainingPass, begin: float, parts: int) -> Refresh:
        """Measure with 1 / `parts` of the microbatches and rows."""
        c = self._config
        # Agreed on first: later, peers wait for each other within Megatron's own groups.
        inputs, settings, runner = attempt(
            "preparing to measure",
            lambda: self._prepared(step, training, parts),
            self._agreement.measuring,
        )
        statistics = measure(inputs, settings, runner)
        options, lowest = self._offer.options, self._offer.lowest_format
        quality = QualitySettings(options, lowest, c.loss_join, c.weight_join, c.weight_lambda)
        divergences = divergence_table(statistics, quality, warn=self._topology.rank == 0)
        problem = problem_dict(divergences, lowest, c.efficiency_target)
        seconds = time.perf_counter() - begin
        return Refresh(step, statistics, divergences, self._offer.restricted(problem), seconds)

    def _prepared(
        self, step: int, training: TrainingPass, parts: int
    ) -> tuple[RefreshInputs, MeasureSettings, CarefulPasses]:
        c = self._config
        topology = replace(self._topology, control=self._agreement.measuring)
        microbatches, num_rows = -(-c.stat_microbatches // parts), -(-c.probe_rows // parts)
        passes = MeasuringPasses(training, self._model.runtime, microbatches)
        inputs = RefreshInputs(
            linears=self._model.all_linears,
            weights=self._model.weights(),
            optimizer=self._optimizer,
            topology=topology,
            probe_relative_step=c.probe_relative_step,
        )
        on_offer = {name for option in self._offer.options for name in option.formats}
        formats = tuple(name for name in c.formats if name != "bf16" and name in on_offer)
        settings = MeasureSettings(formats, step, c.seed, num_rows, c.probes)
        return inputs, settings, CarefulPasses(passes, topology)


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

"""One refresh's measurement, in order: sensitivity, pass A, pass B, reduction.

Called by all ranks together; every rank returns the same table, or every rank raises the same
error. The passes themselves are run by the caller's `PassRunner`, which knows Megatron's
schedules and puts every state it touches back.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatron_snip.collectives import attempt, confirm, sum_over
from megatron_snip.log import warn_once
from megatron_snip.statistics.coupling import couple
from megatron_snip.statistics.probe import Comparer, ProbedWeight, perturb, probe_step, restore
from megatron_snip.statistics.probe_quality import poor_probe_warning
from megatron_snip.statistics.recorder import MeasureSettings, Recorder
from megatron_snip.statistics.records import StatisticsTable
from megatron_snip.statistics.reduce import LinearInfo, ReduceInputs, reduce_statistics
from megatron_snip.statistics.sensitivity import PlannedWeight, Sensitivity, gather_sensitivity
from megatron_snip.statistics.sketch import WIDTH, across, own_squares
from megatron_snip.statistics.tap import Observer
from megatron_snip.topology import Topology

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PassResult:
    """What a measuring pass tells besides what the observer saw.

    Attributes:
        loss_sum: sum of the microbatch losses on this rank (0 where it computes none).
        loss_count: number of microbatch losses in that sum.
    """

    loss_sum: float
    loss_count: int


class PassRunner(Protocol):
    """Runs the statistics microbatches forward and backward; called by all ranks together."""

    @property
    def num_microbatches(self) -> int:
        """Microbatches a data rank in each pass."""

    @property
    def grad_scale(self) -> float:
        """Factor from G as the linears see it to the gradient of the batch-mean loss."""

    def prepare(self) -> None:
        """Finish what is under way, so that weights may be read and changed."""

    def run(self, observer: Observer) -> PassResult:
        """Run one pass with `observer` on every planned linear, all of them in BF16.

        Gradients are discarded; RNG states, buffers and the data's order are as before. What the
        linears' spare memory holds stays.
        """

    def finish(self) -> None:
        """Take the spare memory back; called after `prepare`, whatever happened meanwhile."""


@dataclass(frozen=True)
class RefreshInputs:
    """What stays the same from refresh to refresh.

    Attributes:
        linears: every linear of the model, in the same order on all ranks.
        weights: this rank's linears, frozen ones included, by instance.
        optimizer: Megatron's optimizer.
        topology: this rank's place.
        probe_relative_step: size of the probe relative to the weights.
    """

    linears: tuple[LinearInfo, ...]
    weights: Mapping[str, PlannedWeight]
    optimizer: Any
    topology: Topology
    probe_relative_step: float

    @property
    def trained(self) -> dict[str, PlannedWeight]:
        """The linears whose weights the optimizer updates."""
        return {i: w for i, w in self.weights.items() if w.weight.requires_grad}


def measure(
    inputs: RefreshInputs, settings: MeasureSettings, runner: PassRunner
) -> StatisticsTable:
    """All ranks: run both passes and return the model's statistics.

    Raises:
        RemoteFailure: on every rank, if measuring failed on any; weights are as before.
    """
    runner.prepare()
    try:
        return _measure(inputs, settings, runner)
    finally:
        runner.finish()


def _measure(
    inputs: RefreshInputs, settings: MeasureSettings, runner: PassRunner
) -> StatisticsTable:
    topology = inputs.topology
    sensitivity = gather_sensitivity(inputs.trained, inputs.optimizer, topology)
    recorder = Recorder(settings, topology, {i: s.d for i, s in sensitivity.items()})
    result = runner.run(recorder)
    confirm("pass A (statistics)", recorder.failure, topology.control)
    update_square = _update_squares(inputs, sensitivity, recorder, runner)
    eps = _probe_step(inputs, sensitivity, update_square)
    eps = _probe(inputs, settings, runner, recorder, sensitivity, update_square, eps)
    table = reduce_statistics(
        ReduceInputs(
            step=settings.step,
            formats=settings.formats,
            linears=inputs.linears,
            placements={i: w.placement for i, w in inputs.weights.items()},
            observations=recorder.observations,
            update_square=update_square,
            eps=eps,
            grad_scale=runner.grad_scale,
            num_microbatches=runner.num_microbatches,
            loss_sum=result.loss_sum,
            loss_count=result.loss_count,
            num_probes=settings.num_probes,
        ),
        topology,
    )
    warning = poor_probe_warning(table.linears)
    if warning is not None and topology.rank == 0:
        warn_once(logger, warning)
    return table


def _update_squares(
    inputs: RefreshInputs,
    sensitivity: Mapping[str, Sensitivity],
    recorder: Recorder,
    runner: PassRunner,
) -> dict[str, float]:
    """|update_k|^2 by instance; the measured |dW|^2 where the optimizer has no moments yet."""
    missing = [i for i, s in sensitivity.items() if s.update_square is None]
    squares = {i: s.update_square for i, s in sensitivity.items() if s.update_square is not None}
    parts = attempt(
        "collecting gradients' norms",
        lambda: {i: _gradient_parts(inputs.weights[i], recorder) for i in missing},
        inputs.topology.control,
    )
    for instance in missing:
        total = _gradient_square(inputs.weights[instance], parts[instance], inputs.topology)
        squares[instance] = total * runner.grad_scale**2 or 1.0  # no gradient: nothing to normalize
    return squares


def _gradient_parts(planned: PlannedWeight, recorder: Recorder) -> torch.Tensor:
    """[microbatches, 1 + WIDTH] FP64: |dW|^2 of this shard and its sketch."""
    seen = recorder.observations.get(planned.placement.instance, [])
    shape, device = (len(seen), 1 + WIDTH), planned.weight.device
    parts = torch.zeros(shape, dtype=torch.float64, device=device)
    for part, o in zip(parts, seen, strict=True):
        part.copy_(torch.cat([o.norms[4:5], o.wgrad]))
    return parts


def _gradient_square(planned: PlannedWeight, parts: torch.Tensor, topology: Topology) -> float:
    """Ranks that hold a weight: |dW|^2 of the sum over microbatches, in units of G."""
    placement = planned.placement
    sum_over(parts, placement.tensor.group)
    apart, common = parts[:, 0].sum(), own_squares(parts[:, 1:]).sum(0)
    total = sum_over(torch.cat([apart[None], common]), topology.data_axis(placement).group)
    whole = float(total[0] + across(total[1:]))
    return float(total[0]) if whole <= 0 else whole  # of a sketch, less than nothing is chance


def _probe_step(
    inputs: RefreshInputs,
    sensitivity: Mapping[str, Sensitivity],
    update_square: Mapping[str, float],
) -> float:
    """All ranks: agree on eps from the sums over all linears of all ranks."""
    topology = inputs.topology
    sums = torch.zeros(2, dtype=torch.float64)
    for instance, s in sensitivity.items():
        placement = inputs.weights[instance].placement
        if placement.tensor.rank == 0 and topology.data_axis(placement).rank == 0:
            sums[0] += s.weight_square
            sums[1] += s.direction_square / update_square[instance]
    sum_over(sums, topology.control)
    return probe_step(inputs.probe_relative_step, float(sums[0]), float(sums[1]))


def _probe(
    inputs: RefreshInputs,
    settings: MeasureSettings,
    runner: PassRunner,
    recorder: Recorder,
    sensitivity: Mapping[str, Sensitivity],
    update_square: Mapping[str, float],
    eps: float,
) -> float:
    """All ranks: pass B, as often as asked for; return eps as it was really applied.

    What rounding to the weights' dtype adds to the perturbation, or swallows of it, changes its
    size over all linears; the estimates are slopes, so they are divided by the size it had.
    """
    control = inputs.topology.control
    sizes = torch.zeros(2, dtype=torch.float64)
    for draw in range(settings.num_probes):
        if draw > 0:  # the buffers held D, and hold the weights since
            sensitivity = gather_sensitivity(inputs.trained, inputs.optimizer, inputs.topology)
        weights = [
            ProbedWeight(p.placement, p.weight, sensitivity[i].d, update_square[i] ** 0.5)
            for i, p in inputs.trained.items()
        ]
        comparer = Comparer(recorder.observations)

        def perturb_all(weights: list[ProbedWeight] = weights, draw: int = draw) -> None:
            for probed in weights:
                pair = perturb(probed, eps, settings.seed, settings.step, draw)
                tensor = probed.placement.tensor
                speaks = tensor.shard == tensor.rank  # of the ranks that hold a weight whole, one
                if speaks and inputs.topology.data_axis(probed.placement).rank == 0:
                    sizes.add_(torch.tensor(pair, dtype=torch.float64))

        try:
            attempt("perturbing the weights", perturb_all, control)
            runner.run(comparer)
        finally:
            for probed in weights:
                restore(probed)
        confirm("pass B (probe)", comparer.failure, control)
        confirm("pass B (probe)", _couple(inputs, settings, recorder, draw), control)
    applied, intended = sum_over(sizes, control).tolist()
    return eps * math.sqrt(applied / intended) if intended > 0 and applied > 0 else eps


def _couple(
    inputs: RefreshInputs, settings: MeasureSettings, recorder: Recorder, draw: int
) -> str | None:
    """All ranks: join the errors with what the probe changed; return why it failed, or None."""
    failure = None
    for instance, seen in recorder.observations.items():
        planned = inputs.weights[instance]
        reason = couple(
            planned.placement, planned.weight.data, seen, settings, recorder.signs, draw
        )
        failure = failure or reason
    return failure

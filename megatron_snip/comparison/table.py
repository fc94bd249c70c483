"""Table: each contender against BF16 and against a rival, pair by pair.

For contender c and seed i, with the losses that they had on the same samples,

    gap          = validation(c, i) - validation(bf16, i)
    training gap = mean over steps of  loss(c, i, step) - loss(bf16, i, step)
    over rival   = validation(c, i) - validation(rival, i)

and over the seeds that both have, their mean and sample standard deviation. What the data and the
initial weights of a seed do to all contenders drops out of the differences. A step counts as
diverged where its loss is not finite or more than `DIVERGED` above BF16's of the same step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron_snip.comparison.contender import BASELINE
from megatron_snip.comparison.gemm_rates import DEVICES, relative_step_time
from megatron_snip.comparison.measured_rates import measured_step_time
from megatron_snip.comparison.outcome import Outcome
from megatron_snip.comparison.run import Entry
from megatron_snip.comparison.spread import Spread, spread_of
from megatron_snip.planning.calibration import CalibrationTable
from megatron_snip.reporting.report.words import printable
from megatron_snip.trainer.config import TrainConfig

DIVERGED = 0.5
"""Nats above BF16's loss of the same step."""

RIVAL = "snip-linear"
"""Whom every contender is compared with, beside BF16."""

YARDSTICK = "random"
"""Whose gap others are a share of."""

_Difference = Callable[[Outcome, Outcome], float]


@dataclass(frozen=True)
class Row:
    """One contender; losses in nats.

    Attributes:
        contender: name.
        seeds: how many have finished.
        lowest_fraction: share of linear FLOPs in the lowest format, mean over steps and seeds.
        validation: held-out loss at the end.
        gap: of it to BF16.
        relative_gap: mean gap over BF16's mean loss.
        training_gap: of the training loss, mean over the steps.
        over_rival: validation loss minus the rival's.
        share_of_yardstick: mean gap over the yardstick's; NaN where that is not positive.
        diverged_steps: over all seeds.
        step_time: predicted, over BF16's, by device; NaN where a run has not kept what it takes.
    """

    contender: str
    seeds: int
    lowest_fraction: float
    validation: Spread
    gap: Spread
    relative_gap: float
    training_gap: Spread
    over_rival: Spread
    share_of_yardstick: float
    diverged_steps: int
    step_time: Mapping[str, float]


@dataclass(frozen=True)
class Table:
    """All contenders under one mode, lowest format and target.

    Attributes:
        mode: how its runs branched.
        lowest: the lowest format.
        target: share of linear FLOPs in it that was asked for.
        rows: in the order of the configuration; contenders without a finished run are left out.
    """

    mode: str
    lowest: str
    target: float
    rows: tuple[Row, ...]

    @property
    def title(self) -> str:
        """One line."""
        return f"{self.mode}, {100 * self.target:g} % of linear FLOPs in {self.lowest}"

    @property
    def slug(self) -> str:
        """A name for files: forks-fp4-75."""
        return f"{self.mode}-{self.lowest}-{100 * self.target:g}"


@dataclass(frozen=True)
class Calibration:
    """A machine whose step times are predicted from its own GEMMs.

    Attributes:
        table: their seconds.
        model: what the comparison trains.
    """

    table: CalibrationTable
    model: TrainConfig

    @property
    def device(self) -> str:
        """What it is called in tables, beside the devices of `gemm_rates`."""
        name = printable(self.table.device).replace("|", "/")
        return f"{name}, calibrated" if name in {d.name for d in DEVICES} else name

    def step_time(self, outcomes: Sequence[Outcome]) -> dict[str, float]:
        """Return the mean predicted time of the runs' steps over BF16's, by the device's name."""
        times = [measured_step_time(o.options, self.table, self.model) for o in outcomes]
        return {self.device: math.fsum(times) / len(times)}


def make_tables(
    entries: Sequence[Entry],
    outcomes: Mapping[str, Outcome],
    calibration: Calibration | None = None,
) -> tuple[Table, ...]:
    """Return a table for every mode, lowest format and target of which something has finished.

    Args:
        entries: all of a comparison, in order.
        outcomes: of the runs that have finished, by key.
        calibration: a machine to predict step times for, beside those of `gemm_rates`.

    Raises:
        UsageError: if the calibration lacks a linear or a format that a run has used.
    """
    places = dict.fromkeys((e.mode, e.lowest, e.target) for e in entries)
    tables = []
    for place in places:
        of_place = [e for e in entries if (e.mode, e.lowest, e.target) == place]
        rows = _rows(of_place, outcomes, place[1], calibration)
        if rows:
            tables.append(Table(*place, rows))
    return tuple(tables)


def _rows(
    entries: Sequence[Entry],
    outcomes: Mapping[str, Outcome],
    lowest: str,
    calibration: Calibration | None,
) -> tuple[Row, ...]:
    found: dict[str, dict[int, Outcome]] = {}
    for entry in entries:
        outcome = outcomes.get(entry.run.key)
        if outcome is not None:
            found.setdefault(entry.contender, {})[entry.seed] = outcome
    names = [n for n in dict.fromkeys(e.contender for e in entries) if n in found]
    yardstick = _spread(found, YARDSTICK, BASELINE, validation_gap).mean
    return tuple(_row(found, name, yardstick, lowest, calibration) for name in names)


def _row(
    found: Mapping[str, Mapping[int, Outcome]],
    name: str,
    yardstick: float,
    lowest: str,
    calibration: Calibration | None,
) -> Row:
    outcomes = list(found[name].values())
    gap = _spread(found, name, BASELINE, validation_gap)
    reference = [o.validation_loss for s, o in found.get(BASELINE, {}).items() if s in found[name]]
    shares = _mean_shares(outcomes)
    baseline = found.get(BASELINE, {})
    return Row(
        contender=name,
        seeds=len(outcomes),
        lowest_fraction=shares.get(lowest, 0.0),
        validation=spread_of([o.validation_loss for o in outcomes]),
        gap=gap,
        relative_gap=gap.mean / spread_of(reference).mean,
        training_gap=_spread(found, name, BASELINE, training_gap),
        over_rival=_spread(found, name, RIVAL, validation_gap),
        share_of_yardstick=gap.mean / yardstick if yardstick > 0 else math.nan,
        diverged_steps=sum(
            diverged_steps(o, baseline[s]) for s, o in found[name].items() if s in baseline
        ),
        step_time={
            **{d.name: relative_step_time(shares, d) for d in DEVICES},
            **(calibration.step_time(outcomes) if calibration is not None else {}),
        },
    )


def validation_gap(first: Outcome, second: Outcome) -> float:
    """Return the difference of the last held-out losses."""
    return first.validation_loss - second.validation_loss


def training_gap(first: Outcome, second: Outcome) -> float:
    """Return the mean difference of the training losses of common steps; NaN without any."""
    differences = _step_differences(first, second)
    return math.fsum(differences) / len(differences) if differences else math.nan


def diverged_steps(outcome: Outcome, baseline: Outcome) -> int:
    """Return how many steps' losses are far above the baseline's, or not finite."""
    return sum(not d <= DIVERGED for d in _step_differences(outcome, baseline))


def _step_differences(first: Outcome, second: Outcome) -> list[float]:
    other = dict(zip(second.steps, second.losses, strict=True))
    pairs = zip(first.steps, first.losses, strict=True)
    return [loss - other[step] for step, loss in pairs if step in other]


def _spread(
    found: Mapping[str, Mapping[int, Outcome]], name: str, against: str, of: _Difference
) -> Spread:
    """Return the spread of a paired difference over the seeds that both have."""
    first, second = found.get(name, {}), found.get(against, {})
    return spread_of([of(first[seed], second[seed]) for seed in sorted(first) if seed in second])


def _mean_shares(outcomes: Sequence[Outcome]) -> dict[str, float]:
    names = sorted({name for outcome in outcomes for name in outcome.shares})
    return {n: sum(o.shares.get(n, 0.0) for o in outcomes) / len(outcomes) for n in names}

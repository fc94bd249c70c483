"""Schedule: from what is compared to the runs that it takes, in the order in which they matter.

Pairing. All contenders of a seed start from the same checkpoint (weights, AdamW state, step) and
see the same samples in the same order: they share `seed`, `global_batch_size`, `seq_length`,
`train_iters`, which decide the order. The held-out samples are decided by the same settings. What
differs is SNIP's settings. Every contender's plan is in force from the first step after the
checkpoint: fixed ones are made from names, measured ones from one measurement that they share.

Tables fill from the top: all contenders of a seed before the next seed, all seeds before the next
table, so that a comparison that is cut short has whole tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_snip.comparison.contender import BASELINE, Contender
from megatron_snip.comparison.run import Entry, Run
from megatron_snip.comparison.settings import Branching, ComparisonConfig
from megatron_snip.config import make_config

SPELLED_OUT = {
    "granularity",
    "loss_join",
    "weight_lambda",
    "stat_decay",
}
"""SNIP's settings whose defaults follow the evidence: a plan under another default is another."""


@dataclass(frozen=True)
class Schedule:
    """What is to be run and what it is for.

    Attributes:
        runs: every run once, after the runs that it needs.
        entries: which run gives which number.
    """

    runs: tuple[Run, ...]
    entries: tuple[Entry, ...]


def make_schedule(config: ComparisonConfig) -> Schedule:
    """Return all runs and entries, in order."""
    entries = tuple(_entries(config))
    runs: dict[str, Run] = {}
    for entry in entries:
        for run in _with_needs(entry.run):
            runs.setdefault(run.key, run)
    return Schedule(tuple(runs.values()), entries)


def _with_needs(run: Run) -> Iterator[Run]:
    for needed in run.needs:
        yield from _with_needs(needed)
    yield run


def _entries(config: ComparisonConfig) -> Iterator[Entry]:
    for mode in config.modes:
        for target in config.targets:
            for lowest in config.lowest:
                for seed in range(config.seeds):
                    for name in dict.fromkeys(config.policies):
                        contender = config.contender(name, lowest)
                        place = _Place(config, mode, lowest, target, seed)
                        run = place.branch(contender)
                        yield Entry(mode, lowest, target, seed, contender.name, run)


@dataclass(frozen=True)
class _Place:
    """One seed of one table."""

    config: ComparisonConfig
    mode: str
    lowest: str
    target: float
    seed: int

    @property
    def branching(self) -> Branching:
        return self.config.branching(self.mode)

    @property
    def shared(self) -> dict[str, Any]:
        """Settings of all runs that are not the trainer's defaults, without SNIP's."""
        train = self.config.train_config()
        values = train.model_dump(mode="json", exclude={"snip", "run_dir"}, exclude_defaults=True)
        b = self.branching
        if train.lr_decay_iters is None and train.lr_decay_style != "constant":
            values["lr_decay_iters"] = b.base_steps + b.steps  # one schedule for base and branch
        return values

    def base(self) -> Run:
        """Return the common beginning."""
        b = self.branching
        seed = self.config.train_config().seed + (self.seed if b.own_base else 0)
        name = f"{self.mode}-base" + (f"-s{self.seed}" if b.own_base else "")
        values = {
            **self.shared,
            "seed": seed,
            "train_iters": b.base_steps,
            "eval_iters": 0,
            "eval_interval": b.base_steps,
        }
        return Run("base", name, values, last_step=b.base_steps)

    def measurement(self) -> Run:
        """Return the step that the first plans of all measured contenders are made from."""
        b = self.branching
        snip = {
            **self._snip(),
            "enabled": True,
            "collect_only": True,
            "policy": "none",
            "formats": [self.config.gentle, self.lowest],
            "start_step": b.base_steps,
        }
        values = {
            **self._branch_values(),
            "snip": _settled(snip, True),
            "exit_interval": b.base_steps + 1,
        }
        name = f"{self.mode}-{self.lowest}-s{self.seed}-measure"
        first = b.base_steps
        return Run("measure", name, values, self.base(), None, first, first + 1)

    def branch(self, contender: Contender) -> Run:
        """Return a contender's run."""
        b = self.branching
        values = {**self._branch_values(), "snip": self._contender_snip(contender)}
        target = "" if contender.uniform else f"-{self.lowest}-{100 * self.target:g}"
        name = f"{self.mode}{target}-{contender.name}-s{self.seed}"
        measurement = self.measurement() if contender.measured else None
        last = b.base_steps + b.steps
        return Run("branch", name, values, self.base(), measurement, b.base_steps, last)

    def _branch_values(self) -> dict[str, Any]:
        b = self.branching
        # A fork's data are others than the base's; a run from scratch goes on with its base's.
        offset = self.seed if b.own_base else self.seed + 1
        last = b.base_steps + b.steps
        return {
            **self.shared,
            **(self._cooldown() if b.cooldown else {}),
            "seed": self.config.train_config().seed + offset,
            "train_iters": last,
            "eval_interval": b.eval_interval or last,
        }

    def _cooldown(self) -> dict[str, Any]:
        """A linear schedule that passes through the base's rate where the branches begin.

        Megatron's falls from `lr` after `w` warm-up steps to 0 after `D`: at step b it is
        lr (D - b) / (D - w). With b the first step of the branches this is the base's rate.
        """
        b, train = self.branching, self.config.train_config()
        decay, warm_up = b.base_steps + b.steps, train.lr_warmup_iters
        return {
            "lr": train.lr * (decay - warm_up) / (decay - b.base_steps),
            "min_lr": 0.0,
            "lr_decay_style": "linear",
            "lr_decay_iters": decay,
        }

    def _snip(self) -> dict[str, Any]:
        """SNIP's settings that all contenders share."""
        given = self.config.train.get("snip") or {}
        return {**given, "seed": int(given.get("seed", 0)) + self.seed}

    def _contender_snip(self, contender: Contender) -> dict[str, Any]:
        """Return SNIP's settings of a contender."""
        if contender.name == BASELINE:
            return {"enabled": False}  # Megatron as it is
        b = self.branching
        values = {**self._snip(), "enabled": True, **contender.settings}
        if contender.uniform is not None:
            formats = list(dict.fromkeys(contender.uniform.formats))
            values |= {"formats": formats, "efficiency_target": 0.0}
        else:
            formats = [self.config.gentle, self.lowest]
            values |= {"formats": formats, "efficiency_target": self.target}
        if contender.measured and b.interval is None:
            values |= {"freeze_plan": True, "stop_step": 0}
        elif contender.measured and b.interval is not None:
            values |= {"start_step": b.base_steps + b.interval, "interval": b.interval}
        return _settled(values, contender.measured)


def _settled(values: dict[str, Any], measured: bool) -> dict[str, Any]:
    """Return SNIP's settings that are not defaults, and where they count those of `SPELLED_OUT`."""
    config = make_config(values)
    always = config.model_dump(mode="json", include=SPELLED_OUT if measured else set())
    return {**config.model_dump(mode="json", exclude_defaults=True), **always}

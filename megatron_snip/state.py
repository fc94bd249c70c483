"""ControllerState: what a checkpoint keeps of SNIP, so that a resumed run replays exactly.

Plain built-in types both ways (`to_dict`, `from_dict`): the dict travels inside Megatron's
checkpoints, which are read with `weights_only=True`. Schema version 2:

    {"version": 2, "iteration": int, "plan": {a plan file's object},
     "history": [[iteration, digest], ...], "refreshed": int | null,
     "statistics": null | {a StatisticsTable's}, "settings": {name: text},
     "pending": null | {"iteration": int, "apply_at": int, "problem": {a problem file's object}},
     "guard": null | {"loss": {a LossMonitor's}, "good": null | {a plan file's object},
                      "refused": [digest, ...], "falls": int, "refresh_at": int | null}}

Version 1 counted iterations from 0 (`step`) and is still read. A plan that was being solved is kept
as its problem: the resumed run solves it again and applies the plan at the same iteration.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_snip.errors import UsageError
from megatron_snip.guard import GuardState, LossMonitor
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.planning.problem import PlanningProblem
from megatron_snip.statistics.records import StatisticsTable

SCHEMA_VERSION = 2


@dataclass(frozen=True)
class Pending:
    """A problem that the solver works on; the same on all ranks.

    Attributes:
        iteration: whose statistics it was made from.
        apply_at: iteration before which the plan is broadcast and applied.
        problem: the planning problem.
    """

    iteration: int
    apply_at: int
    problem: PlanningProblem

    def to_dict(self) -> dict[str, Any]:
        """Return plain types."""
        problem = self.problem.to_dict()
        return {"iteration": self.iteration, "apply_at": self.apply_at, "problem": problem}


@dataclass(frozen=True)
class ControllerState:
    """A controller between two iterations.

    Attributes:
        iteration: the last iteration done; 0 before training.
        plan: the current plan.
        history: (iteration, digest) of every plan applied, in order.
        refreshed: the first iteration of the last refresh that began, or None.
        pending: what the solver works on, or None.
        guard: None without a guard.
        statistics: running mean of the measurements, or None.
        settings: settings and versions whose change a resumed run reports, as text.
    """

    iteration: int
    plan: PrecisionPlan
    history: tuple[tuple[int, str], ...] = ()
    refreshed: int | None = None
    pending: Pending | None = None
    guard: GuardState | None = None
    statistics: StatisticsTable | None = None
    settings: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the dict described above."""
        return {
            "version": SCHEMA_VERSION,
            "iteration": self.iteration,
            "plan": self.plan.to_dict(),
            "history": [[iteration, digest] for iteration, digest in self.history],
            "refreshed": self.refreshed,
            "pending": None if self.pending is None else self.pending.to_dict(),
            "guard": None if self.guard is None else self.guard.to_dict(),
            "statistics": None if self.statistics is None else self.statistics.to_dict(),
            "settings": dict(self.settings),
        }

    def restarted_at(self, iteration: int) -> ControllerState:
        """Return the state for a run that resumes at another iteration: only the plan stays."""
        return replace(self, iteration=iteration, refreshed=None, pending=None, guard=None)

    @classmethod
    def from_dict(cls, value: Any, source: str = "SNIP state") -> ControllerState:
        """Build from what `to_dict` returned.

        Args:
            value: the dict.
            source: its origin, for messages.

        Raises:
            UsageError: one line that names `source` and what is wrong.
        """
        version = value.get("version") if isinstance(value, dict) else None
        if version not in (1, SCHEMA_VERSION):
            raise UsageError(
                f"{source}: version {version!r}; this megatron-snip reads versions 1 and "
                f"{SCHEMA_VERSION}"
            )
        done, number = ("step", "step") if version == 1 else ("iteration", "iteration")
        shift = 1 if version == 1 else 0  # version 1 numbered iterations from 0
        try:
            refreshed, pending = value["refreshed"], value["pending"]
            guard = value.get("guard")
            # Version 1 measured other columns: the running mean starts anew.
            statistics = None if version == 1 else value.get("statistics")
            return cls(
                iteration=int(value[done]),  # a count of iterations in both versions
                plan=PrecisionPlan.from_dict(value["plan"], f"{source}, plan"),
                history=tuple((int(i) + shift, str(digest)) for i, digest in value["history"]),
                refreshed=None if refreshed is None else int(refreshed) + shift,
                pending=None
                if pending is None
                else Pending(
                    int(pending[number]) + shift,
                    int(pending["apply_at"]) + shift,
                    _problem(pending, f"{source}, pending problem"),
                ),
                guard=None if guard is None else _guard(guard, source, shift),
                statistics=None if statistics is None else StatisticsTable.from_dict(statistics),
                settings={str(k): str(v) for k, v in value.get("settings", {}).items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            detail = f"{type(error).__name__}: {error}"
            raise UsageError(f"{source} is damaged ({detail})") from None


def _problem(pending: dict[str, Any], source: str) -> PlanningProblem:
    """Read the problem; version 1 has the scores of the options beside it, as `metrics`."""
    problem, metrics = dict(pending["problem"]), pending.get("metrics", {})
    if metrics:
        problem["linears"] = [
            {**row, "options": _with_scores(row["options"], metrics.get(row["name"], {}))}
            for row in problem["linears"]
        ]
    return PlanningProblem.from_dict(problem, source)


def _with_scores(options: dict[str, Any], metrics: dict[str, Any]) -> dict[str, Any]:
    """Add scores to the options' costs; values that are not finite become None."""
    return {
        option: {
            **cost,
            "scores": {
                name: score if math.isfinite(score) else None
                for name, score in metrics.get(option, {}).items()
            },
        }
        for option, cost in options.items()
    }


def _guard(value: dict[str, Any], source: str, shift: int) -> GuardState:
    good, refresh_at = value["good"], value["refresh_at"]
    return GuardState(
        loss=LossMonitor.from_dict(value["loss"]),
        good=None if good is None else PrecisionPlan.from_dict(good, f"{source}, good plan"),
        refused=tuple(str(digest) for digest in value["refused"]),
        num_reverted=int(value["falls"]),
        refresh_at=None if refresh_at is None else int(refresh_at) + shift,
    )

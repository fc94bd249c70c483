"""ControllerState: what a checkpoint keeps of SNIP, so that a run can go on as if never stopped.

Plain built-in types both ways (`to_dict`, `from_dict`): the dict travels inside Megatron's
checkpoints, which are read with `weights_only=True`, and in sidecar JSON files. Schema version 1:

    {"version": 1, "step": int, "plan": {a plan file's object}, "history": [[step, digest], ...],
     "refreshed": int | null, "statistics": null | {a StatisticsTable's},
     "pending": null | {"step": int, "apply_at": int, "problem": {a problem file's object}},
     "guard": null | {"loss": {a LossGuard's}, "good": null | {a plan file's object},
                      "refused": [digest, ...], "falls": int, "refresh_at": int | null}}

`guard` and `statistics` may be missing, as in older checkpoints. There, `pending` has the scores of
the options apart, as "metrics".

A plan that was still being solved is kept as its problem: the resumed run submits it again and the
outcome is applied at the same step. Stochastic rounding and the sampled tokens are functions of the
seed and the step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megatron_snip.errors import UsageError
from megatron_snip.loss_guard import LossGuard
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.planning.problem import PlanningProblem
from megatron_snip.statistics.records import StatisticsTable

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Pending:
    """A problem that the solver is working on; the same on all ranks.

    Attributes:
        step: training step that was measured.
        apply_at: training step before which the outcome is broadcast.
        problem: what is being solved.
    """

    step: int
    apply_at: int
    problem: PlanningProblem

    def to_dict(self) -> dict[str, Any]:
        """Return plain types."""
        problem = self.problem.to_dict()
        return {"step": self.step, "apply_at": self.apply_at, "problem": problem}


@dataclass(frozen=True)
class GuardState:
    """What is known of the plans' standing.

    Attributes:
        loss: the losses heard, and the watch on the plan in force.
        good: the plan to fall back to, or None before the first change.
        refused: digests of plans that went.
        falls: plans that went since one has proven itself.
        refresh_at: step at which a refresh is wanted because a plan went, or None.
    """

    loss: LossGuard
    good: PrecisionPlan | None = None
    refused: tuple[str, ...] = ()
    falls: int = 0
    refresh_at: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain types."""
        return {
            "loss": self.loss.to_dict(),
            "good": None if self.good is None else self.good.to_dict(),
            "refused": list(self.refused),
            "falls": self.falls,
            "refresh_at": self.refresh_at,
        }


@dataclass(frozen=True)
class ControllerState:
    """A controller between two steps.

    Attributes:
        step: training steps done; the next one is number `step` (0-based).
        plan: in force.
        history: (step, digest) of every plan applied, in order.
        refreshed: the first step of the last refresh that was begun, or None.
        pending: what the solver is working on, or None.
        guard: the plans' standing, or None without a guard.
        statistics: running mean of what was measured, or None.
    """

    step: int
    plan: PrecisionPlan
    history: tuple[tuple[int, str], ...] = ()
    refreshed: int | None = None
    pending: Pending | None = None
    guard: GuardState | None = None
    statistics: StatisticsTable | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the dict described above."""
        return {
            "version": SCHEMA_VERSION,
            "step": self.step,
            "plan": self.plan.to_dict(),
            "history": [[step, digest] for step, digest in self.history],
            "refreshed": self.refreshed,
            "pending": None if self.pending is None else self.pending.to_dict(),
            "guard": None if self.guard is None else self.guard.to_dict(),
            "statistics": None if self.statistics is None else self.statistics.to_dict(),
        }

    @classmethod
    def from_dict(cls, value: Any, source: str = "SNIP state") -> ControllerState:
        """Build from what `to_dict` returned.

        Args:
            value: the dict.
            source: where it came from, for messages.

        Raises:
            UsageError: one line that names `source` and what is wrong.
        """
        version = value.get("version") if isinstance(value, dict) else None
        if version != SCHEMA_VERSION:
            raise UsageError(
                f"{source}: version {version!r}; this megatron-snip reads version {SCHEMA_VERSION}"
            )
        try:
            refreshed, pending = value["refreshed"], value["pending"]
            guard, statistics = value.get("guard"), value.get("statistics")
            return cls(
                step=int(value["step"]),
                plan=PrecisionPlan.from_dict(value["plan"], f"{source}, plan"),
                history=tuple((int(step), str(digest)) for step, digest in value["history"]),
                refreshed=None if refreshed is None else int(refreshed),
                pending=None if pending is None else _pending(pending, source),
                guard=None if guard is None else _guard(guard, source),
                statistics=None if statistics is None else StatisticsTable.from_dict(statistics),
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            detail = f"{type(error).__name__}: {error}"
            raise UsageError(f"{source} is damaged ({detail})") from None


def _pending(value: dict[str, Any], source: str) -> Pending:
    problem = dict(value["problem"])
    if "metrics" in value:
        problem["linears"] = [
            {**row, "options": _scored(row["options"], value["metrics"].get(row["name"], {}))}
            for row in problem["linears"]
        ]
    return Pending(
        step=int(value["step"]),
        apply_at=int(value["apply_at"]),
        problem=PlanningProblem.from_dict(problem, f"{source}, pending problem"),
    )


def _scored(options: dict[str, Any], metrics: dict[str, Any]) -> dict[str, Any]:
    """Put the metrics of an older checkpoint into the options; NaN becomes null."""
    return {
        option: {
            **cost,
            "scores": {
                name: None if isinstance(score, float) and not math.isfinite(score) else score
                for name, score in metrics.get(option, {}).items()
            },
        }
        for option, cost in options.items()
    }


def _guard(value: dict[str, Any], source: str) -> GuardState:
    good, refresh_at = value["good"], value["refresh_at"]
    return GuardState(
        loss=LossGuard.from_dict(value["loss"]),
        good=None if good is None else PrecisionPlan.from_dict(good, f"{source}, good plan"),
        refused=tuple(str(digest) for digest in value["refused"]),
        falls=int(value["falls"]),
        refresh_at=None if refresh_at is None else int(refresh_at),
    )

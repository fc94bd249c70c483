"""ControllerState: what a checkpoint keeps of SNIP, so that a resumed run replays exactly.

Plain built-in types both ways (`to_dict`, `from_dict`): the dict travels inside Megatron's
checkpoints, which are read with `weights_only=True`. Schema version 2:

    {"version": 2, "iteration": int, "plan": {a plan file's object},
     "history": [[iteration, digest], ...], "refreshed": int | null,
     "statistics": null | {a StatisticsTable's}, "settings": {name: text},
     "pending": null | {"iteration": int, "apply_at": int, "problem": {a problem file's object}},
     "guard": null | {a GuardState's}, "target": null | number, "alerted": [[alert, linear], ...]}

Of a plan that was being solved its problem is stored: the resumed run solves it again and applies
the plan at the same iteration.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

from pydantic import TypeAdapter

from megatron_snip.config import SnipConfig
from megatron_snip.errors import UsageError, shortened, shown
from megatron_snip.files import OwnSchema, checked
from megatron_snip.guard import GuardState
from megatron_snip.log import warn_once_per_job
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.planning.problem import PlanningProblem
from megatron_snip.statistics.records import StatisticsTable
from megatron_snip.version import PACKAGES, installed_version

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 2


@dataclass(frozen=True)
class Pending:
    """A problem that the solver works on; the same on all ranks.

    Attributes:
        iteration: at which it was given to the solver.
        apply_at: iteration before which the plan is broadcast and applied.
        problem: the planning problem.
    """

    iteration: int
    apply_at: int
    problem: Annotated[PlanningProblem, OwnSchema()]


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
        target: of the last problem that the solver got, or None.
        alerted: (alert of --snip-alert, linear) that were reported.
    """

    iteration: int
    plan: Annotated[PrecisionPlan, OwnSchema()]
    history: tuple[tuple[int, str], ...] = ()
    refreshed: int | None = None
    pending: Pending | None = None
    guard: GuardState | None = None
    statistics: Annotated[StatisticsTable, OwnSchema()] | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    target: float | None = None
    alerted: tuple[tuple[str, str], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the dict described above."""
        return {"version": SCHEMA_VERSION, **_SCHEMA.dump_python(self)}

    def changes(self, settings: Mapping[str, str]) -> list[str]:
        """Return one text for each of the new `settings` that differs from the former one."""
        return [
            f"{name} {self.settings[name]} -> {text}"
            for name, text in settings.items()
            if self.settings.get(name, text) != text
        ]

    @classmethod
    def from_dict(cls, value: Any, source: str = "SNIP state") -> Self:
        """Build from what `to_dict` returned; a guard of another version starts anew.

        Args:
            value: the dict.
            source: its origin, for messages.

        Raises:
            UsageError: one line that names `source` and what is wrong.
        """
        version = value.get("version") if isinstance(value, dict) else None
        if version != SCHEMA_VERSION:
            got = shortened(repr(version), 80)
            raise UsageError(
                f"{source}: version {got}; this megatron-snip reads version {SCHEMA_VERSION}; "
                "resume with the megatron-snip that wrote it, or start from the weights "
                "(--finetune) with its last plan (--snip-plan-file)"
            )
        value = value | {"guard": _guard(value.get("guard"), source)}
        try:
            return checked(cls, value, f"{source} is damaged")
        except UsageError as error:
            raise UsageError(f"{error}; load another checkpoint") from None


_SCHEMA = TypeAdapter(ControllerState)

PLAN_SETTINGS = (
    *("formats", "granularity", "efficiency_target", "target_schedule", "heal_from", "policy"),
    *("pins", "pipeline_balance", "cost", "plan_file"),
)
"""Settings that a plan depends on."""


def reported_settings(config: SnipConfig, backend: str) -> dict[str, str]:
    """Return settings and versions whose change a resumed run reports."""
    versions = {name: installed_version(name) for name in PACKAGES}
    return {
        **_as_text({name: getattr(config, name) for name in PLAN_SETTINGS}),
        **_as_text({"backend": backend, **versions}),
    }


def changed_plan_settings(state: ControllerState, config: SnipConfig) -> frozenset[str]:
    """Return which of `PLAN_SETTINGS` differ from those of the run that wrote a state."""
    new = _as_text({name: getattr(config, name) for name in PLAN_SETTINGS})
    return frozenset(n for n, text in new.items() if state.settings.get(n, text) != text)


def _as_text(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: ",".join(v) if isinstance(v, tuple) else str(v) for name, v in values.items()}


def _guard(value: Any, source: str) -> GuardState | None:
    try:
        return None if value is None else checked(GuardState, value, "the guard starts anew")
    except UsageError as error:
        warn_once_per_job(logger, f"snip: {source}: {shown(error)}")
        return None

"""RunState: a run between two iterations, as one value; all that a checkpoint keeps of SNIP.

An iteration takes the state before it and returns the next one (controller.py). Nothing else holds
what a run knows, but for what is on devices: histories of delayed scaling, snapshots of a step, the
loss of an iteration on its way to the host.

Plain built-in types both ways (`to_dict`, `from_dict`): the dict travels inside Megatron's
checkpoints, which are read with `weights_only=True`. Schema version 4:

    {"version": 4, "iteration": int, "run_id": str, "settings": {name: text},
     "plan": {a plan file's object}, "history": [[iteration, digest], ...],
     "target": null | number, "failed": null | {"target": number, "again_at": int},
     "schedule": {"refreshed": int | null, "due_since": int | null},
     "solve": null | {"iteration": int, "apply_at": int, "problem": packed},
     "heal_from": null | int,
     "guard": null | {a GuardState's},
     "observations": null | packed,
     "alerts": [[alert, linear], ...], "watched": [linear, ...]}

`packed` is a text (files.py): of a problem file's object, and of a StatisticsTable's. With 600
linears they are nine tenths of a state. Version 3 has the objects themselves.

`run_id` is the text in the marker of the run's directory (directory.py). Checkpoints of release
0.2.0 have no `run_id`, `failed`, `heal_from` and `watched`. They have `delayed_scaling` as well,
histories of linears that simulated delayed scaling; these are not read.

If the solver was working on a plan, its problem is stored: the resumed run solves it again, and
with the same lag applies the plan at the same iteration.
"""

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Self

from pydantic import TypeAdapter

from megatron_snip.config import PATH_SETTINGS, SnipConfig
from megatron_snip.errors import UsageError, shortened, shown
from megatron_snip.files import OwnSchema, PackedSchema, checked
from megatron_snip.log import warn_once_per_job
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.run.alerts import Alerted
from megatron_snip.run.guard import GuardState
from megatron_snip.run.schedule import ScheduleState
from megatron_snip.run.solve import PendingProblem
from megatron_snip.statistics.records import StatisticsTable
from megatron_snip.types import ITERATION_LIMIT
from megatron_snip.version import PACKAGES, installed_version

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 4
_OLDER_VERSION = 3


@dataclass(frozen=True)
class FailedTarget:
    """A target for which no plan could be had.

    Attributes:
        target: the target.
        again_at: the iteration from which it is planned for again.
    """

    target: float | None
    again_at: int


@dataclass(frozen=True)
class RunState:
    """A run between two iterations; the same on all ranks.

    Attributes:
        iteration: the last iteration done; 0 before training.
        plan: the current plan.
        run_id: what identifies the run, also in its directory; "" if that is not known.
        history: (first iteration under it, digest) of each plan after the run's first one, in
            order.
        target: the target of the last planning problem; before the first problem, the target of
            the first plan. A new plan is requested when the target schedule has another target.
            None: a new target makes no plan yet, because the policy needs measurements and there
            are none.
        failed: the target for which the solver failed last, or None.
        schedule: which refreshes were measured, and whether one is due.
        solve: what the solver works on, or None.
        heal_from: the refresh that found the gradient below the noise (`--snip-heal-below-noise`),
            from which the run heals; None if none did.
        guard: the losses and the refused plans; None without a guard.
        observations: the running mean of the measurements, or None.
        alerts: (alert of --snip-alert, linear) that were reported.
        watched: the linears that were most fragile in the run's first refresh. Dashboards have
            series of these alone, so that the names of series stay.
        settings: settings and versions whose change a resumed run reports, as text.
    """

    iteration: int
    plan: Annotated[PrecisionPlan, OwnSchema()]
    run_id: str = ""
    history: tuple[tuple[int, str], ...] = ()
    target: float | None = None
    failed: FailedTarget | None = None
    schedule: ScheduleState = field(default_factory=ScheduleState)
    solve: PendingProblem | None = None
    heal_from: int | None = None
    guard: GuardState | None = None
    observations: Annotated[StatisticsTable, PackedSchema()] | None = None
    alerts: Alerted = ()
    watched: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)

    def for_weights_of(self, iteration: int) -> Self:
        """Return the state for weights of another iteration: what was in flight is dropped.

        So is what the guard knew (losses, fallback and refused plans), and the history of plans
        that followed that iteration.
        """
        begins_later = self.heal_from is not None and self.heal_from > iteration
        # The plan and the measurements stay: they are the best that is known of these weights.
        return replace(
            self,
            iteration=iteration,
            heal_from=None if begins_later else self.heal_from,
            history=tuple(entry for entry in self.history if entry[0] <= iteration),
            # A target that only the dropped problem had is planned for again.
            target=self.target if self.solve is None else self.plan.target,
            failed=None,
            schedule=ScheduleState(),
            solve=None,
            guard=None,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the dict described above."""
        return {"version": SCHEMA_VERSION, **_SCHEMA.dump_python(self)}

    def changes(self, settings: Mapping[str, str]) -> list[str]:
        """Return one text for each of the new `settings` that differs from the former one."""
        return [
            f"{name} {self.settings[name]} -> {text}"
            for name, text in settings.items()
            if _differs(name, self.settings.get(name, text), text)
        ]

    @classmethod
    def from_dict(cls, value: Any, source: str = "SNIP state") -> Self:
        """Build from what `to_dict` returned; a guard's entry that cannot be read is dropped.

        Args:
            value: the dict.
            source: the dict's origin, for messages.

        Raises:
            UsageError: one line that names `source` and what is wrong.
        """
        version = value.get("version") if isinstance(value, dict) else None
        if version not in (_OLDER_VERSION, SCHEMA_VERSION):
            got = shortened(repr(version), 80)
            raise UsageError(
                f"{source}: version {got}; this megatron-snip reads version {_OLDER_VERSION} or "
                f"{SCHEMA_VERSION}; "
                "resume with the megatron-snip that wrote it, or start a new run from its weights "
                "(Megatron's --finetune) and its last plan (--snip-plan-file)"
            )
        value = {**value, "guard": _guard(value.get("guard"), source)}
        try:
            state = checked(cls, value, f"{source} is damaged")
            state.check_order(f"{source} is damaged")
        except UsageError as error:
            raise UsageError(f"{error}; load another checkpoint") from None
        return state

    def check_order(self, source: str) -> None:
        """Refuse a state whose iterations contradict each other.

        Raises:
            UsageError: one line that names `source` and the field.
        """
        latest = {
            "history": max((iteration for iteration, _ in self.history), default=0),
            "schedule.refreshed": self.schedule.refreshed or 0,
            "schedule.due_since": self.schedule.due_since or 0,
            "heal_from": self.heal_from or 0,
            "solve.iteration": 0 if self.solve is None else self.solve.iteration,
        }
        if not 0 <= self.iteration < ITERATION_LIMIT:
            raise UsageError(f"{source}: iteration must be from 0 on, got {self.iteration}")
        for name, iteration in latest.items():
            # A run that resumes with another plan notes it at once, for the coming iteration.
            last = self.iteration + 1 if name == "history" else self.iteration
            if not 0 <= iteration <= last:
                raise UsageError(
                    f"{source}: {name} {iteration} is not among the {self.iteration} iterations "
                    "that are done"
                )
        # `apply_at` may be an iteration that is done: one that Megatron skipped.
        solve = self.solve
        if solve is not None and not solve.iteration < solve.apply_at < ITERATION_LIMIT:
            raise UsageError(
                f"{source}: solve.apply_at {solve.apply_at} is not after solve.iteration "
                f"{solve.iteration}"
            )


_SCHEMA = TypeAdapter(RunState)

PLAN_SETTINGS = (
    "formats",
    "granularity",
    "efficiency_target",
    "target_schedule",
    "heal_from",
    "heal_below_noise",
    "policy",
    "pins",
    "pipeline_balance",
    "cost",
    "calibration",
    "plan_file",
    "collect_only",
)
"""What a plan may use and must reach: if one of them changes, a resumed run decides on its
first plan anew (plans.py)."""

_DIGEST_OF = "digest of "


def reported_settings(
    config: SnipConfig, backend: str, recipes: Mapping[str, str], digests: Mapping[str, str] = {}
) -> dict[str, str]:
    """Return what a resumed run reports if it changed: settings, versions, recipes of formats.

    Args:
        config: the settings.
        backend: the backend of the linears.
        recipes: {format: its recipe}, as a text.
        digests: of what the files that settings name hold, by setting.
    """
    versions = {name: installed_version(name) for name in PACKAGES}
    settings = {name: getattr(config, name) for name in SnipConfig.model_fields}
    # A resumed run is on, and may have moved.
    del settings["enabled"], settings["output_dir"]
    return {
        **_as_text(settings),
        **_plan_settings(config, digests),
        **_as_text({"backend": backend, **versions}),
        **{f"recipe of {name}": recipe for name, recipe in recipes.items()},
    }


def changed_plan_settings(
    state: RunState, config: SnipConfig, digests: Mapping[str, str] = {}
) -> frozenset[str]:
    """Return which of `PLAN_SETTINGS` differ from those of the run that wrote a state.

    A file differs if it holds something else than the file of that run. The same under another
    path does not count.
    """
    former = state.settings
    new = _plan_settings(config, digests)
    changed = {
        name for name in PLAN_SETTINGS if _differs(name, former.get(name, new[name]), new[name])
    }
    for name in digests:
        key = _DIGEST_OF + name
        if key in former:  # both runs had such a file: what it holds decides, and not its path
            changed.discard(name)
            if former[key] != new[key]:
                changed.add(name)
    return frozenset(changed)


def _differs(name: str, former: str, new: str) -> bool:
    """Whether a setting changed; two spellings of one path, or a link to it, are the same."""
    if name in PATH_SETTINGS:
        return os.path.realpath(former) != os.path.realpath(new)
    return former != new


def _plan_settings(config: SnipConfig, digests: Mapping[str, str]) -> dict[str, str]:
    of_files = {_DIGEST_OF + name: digest[:12] for name, digest in digests.items()}
    return _as_text({name: getattr(config, name) for name in PLAN_SETTINGS}) | of_files


def _as_text(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: ",".join(v) if isinstance(v, tuple) else str(v) for name, v in values.items()}


def resumed_state(loaded: Any, iteration: int) -> tuple[RunState | None, str | None]:
    """Return the state to resume from, and a warning if it is not of the weights' iteration.

    Args:
        loaded: SNIP's state in the checkpoint, as `to_dict` returned it, or None.
        iteration: the last iteration that trained the checkpoint's weights; 0 without a checkpoint.

    Returns:
        (state or None to start anew, warning or None).

    Raises:
        UsageError: if the state is damaged or of a version that cannot be read.
    """
    if loaded is None:
        if iteration == 0:
            return None, None
        return None, (
            f"the checkpoint of iteration {iteration} has no SNIP state; "
            "starting from the initial plan"
        )
    state = RunState.from_dict(loaded, "SNIP state of the checkpoint")
    if state.iteration == iteration:
        return state, None
    return state.for_weights_of(iteration), (
        f"the checkpoint's SNIP state is of iteration {state.iteration} and training "
        f"resumes after {iteration}; its plan is used; a refresh in flight is dropped, and the "
        "guard starts anew"
    )


def _guard(value: Any, source: str) -> GuardState | None:
    try:
        return None if value is None else checked(GuardState, value, "the guard starts anew")
    # Not worth a run that cannot be resumed: the guard learns the losses again.
    except UsageError as error:
        warn_once_per_job(logger, f"snip: {source}: {shown(error)}")
        return None


def state_of_model(state: RunState, names: Iterable[str]) -> tuple[RunState | None, str | None]:
    """Return the state if it is of a model, or else None to start anew and a warning.

    Args:
        state: the state of a stopped run.
        names: the model's linears.
    """
    planned = state.plan.linears.keys()
    linears = set(names)
    if planned == linears:
        return state, None
    return None, (
        f"the checkpoint's plan and statistics are of another model ({len(linears - planned)} new "
        f"linears, {len(planned - linears)} gone): SNIP starts anew"
    )

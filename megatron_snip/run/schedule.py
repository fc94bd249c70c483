"""When a run measures and when it plans; the same on all ranks.

    iteration i     a refresh is due, and is measured in this iteration
    i + lag         its plan is applied

`Schedule` decides by the settings and by what was done. The controller decides whether a refresh
that is due may begin: the optimizer's moments may be too young, or a plan may still be on its way.

Megatron may skip iterations (`--iterations-to-skip`). So a refresh is due from its turn on, until
it is measured.
"""

from dataclasses import dataclass, replace
from typing import Self

from megatron_snip.config import SnipConfig
from megatron_snip.planning.policies import get_policy


@dataclass(frozen=True)
class ScheduleState:
    """Which refreshes were measured.

    Attributes:
        refreshed: the iteration of the last refresh, or None.
        due_since: the iteration from which a refresh is due that could not be measured yet, or
            None. A resumed run measures it at once.
    """

    refreshed: int | None = None
    due_since: int | None = None


@dataclass(frozen=True)
class Schedule:
    """When a run measures and plans, by its settings.

    Attributes:
        start: `--snip-start-step`.
        interval: `--snip-interval`.
        lag: `--snip-lag`.
        measures: whether refreshes are measured.
        plans_without_statistics: whether the policy needs no statistics. Then it plans before the
            first iteration, and again only if the target changes (by schedule or healing).
        changes_plans: whether refreshes or changes of the target lead to new plans.
        changes_target: whether the target differs between iterations.
    """

    start: int
    interval: int
    lag: int
    measures: bool
    plans_without_statistics: bool
    changes_plans: bool
    changes_target: bool

    @classmethod
    def of(cls, config: SnipConfig) -> Self:
        """Return the schedule of a run's settings."""
        plans_without_statistics = not get_policy(config.policy).needs_statistics
        plans_again = config.target_changes or not plans_without_statistics
        return cls(
            config.start_step,
            config.interval,
            config.lag,
            measures=config.collect_only or not plans_without_statistics,
            plans_without_statistics=plans_without_statistics,
            changes_plans=plans_again and not config.collect_only,
            changes_target=config.target_changes,
        )

    def due_since(
        self, state: ScheduleState, done: int, iteration: int, wanted_at: int | None = None
    ) -> int | None:
        """Return from which iteration on a refresh is due; None if none is due.

        Args:
            state: what was measured.
            done: the last iteration that ran.
            iteration: the iteration that is about to run; later than `done + 1` if Megatron
                skipped some.
            wanted_at: an iteration from which a refresh is wanted out of turn, or None.
        """
        if not self.measures or iteration < self.start:
            return None
        by_turn = self._turn_after(done) if state.due_since is None else state.due_since
        if by_turn <= iteration:
            return by_turn
        if wanted_at is None or iteration < wanted_at:
            return None
        was_measured_since = state.refreshed is not None and state.refreshed >= wanted_at
        return None if was_measured_since else iteration

    def may_plan_for_new_target(self, state: ScheduleState, iteration: int) -> bool:
        """Return whether a plan for a new target is due before the next refresh begins.

        With start 100, interval 200 and lag 2: before iteration 98 the next refresh is 2 iterations
        away, and the plan is due when it begins; before iteration 99 it would come too late.

        Args:
            state: what was measured; the iteration itself measures nothing.
            iteration: the iteration that is about to run.
        """
        if not (self.changes_plans and self.changes_target):
            return False
        next_refresh = self._turn_after(iteration) if state.due_since is None else state.due_since
        return self.plans_without_statistics or next_refresh - iteration >= self.lag

    def checkpointed(self, state: ScheduleState, done: int, iteration: int) -> ScheduleState:
        """Return what a checkpoint after an iteration keeps.

        Args:
            state: what was measured.
            done: the last iteration that ran.
            iteration: the checkpoint's; later than `done` if Megatron skipped the last ones. A
                refresh whose turn was among these is due.
        """
        return replace(state, due_since=self.due_since(state, done, iteration))

    def _turn_after(self, iteration: int) -> int:
        """Return the first iteration after another one at which a refresh begins by its turn."""
        if iteration < self.start:
            return self.start
        return iteration + self.interval - (iteration - self.start) % self.interval

"""When a run measures and when it plans; the same on all ranks.

    iteration i     a refresh is due, and is measured in this iteration
    i + lag         its plan is applied

`Schedule` decides by the settings and by what was done. The controller decides whether a refresh
that is due may begin: a plan may still be on its way.

Megatron may skip iterations (`--iterations-to-skip`). So a refresh is due from its turn on, until
it is measured.
"""

from dataclasses import dataclass, replace
from functools import cached_property

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
        config: the settings.

    Raises:
        UsageError: if the policy is unknown.
    """

    config: SnipConfig

    def __post_init__(self) -> None:
        _ = self.plans_without_statistics  # all ranks refuse an unknown policy here

    @cached_property
    def plans_without_statistics(self) -> bool:
        """Whether the policy needs no statistics.

        Then it plans before the first iteration, and again only if the target changes (by schedule
        or healing).
        """
        return not get_policy(self.config.policy).needs_statistics

    @property
    def measures(self) -> bool:
        """Whether refreshes are measured."""
        return self.config.collect_only or not self.plans_without_statistics

    @property
    def changes_plans(self) -> bool:
        """Whether refreshes or changes of the target lead to new plans."""
        plans_again = self.config.target_changes or not self.plans_without_statistics
        return plans_again and not self.config.collect_only

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
        if not self.measures or iteration < self.config.start_step:
            return None
        # The turn after the last iteration that ran: Megatron may have skipped the turn itself.
        by_turn = self._turn_after(done) if state.due_since is None else state.due_since
        if by_turn <= iteration:
            return by_turn
        if wanted_at is None or iteration < wanted_at:
            return None
        # `wanted_at` stays in the guard's state; one refresh since then is enough.
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
        if not (self.changes_plans and self.config.target_changes):
            return False
        next_refresh = self._turn_after(iteration) if state.due_since is None else state.due_since
        return self.plans_without_statistics or next_refresh - iteration >= self.config.lag

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
        start = self.config.start_step
        interval = self.config.interval
        if iteration < start:
            return start
        since_last_turn = (iteration - start) % interval
        return iteration + interval - since_last_turn

"""When a run measures and when it plans; the same on all ranks.

    iteration i     a refresh is due, and is measured in this iteration
    i + lag         its plan is applied

`RefreshSchedule` counts iterations. The controller decides whether a refresh that is due may begin:
the optimizer's moments may be too young, or a plan may still be on its way.

Megatron may skip iterations (`--iterations-to-skip`). So a refresh is due from its turn on, until
it is measured.
"""

from dataclasses import dataclass

from megatron_snip.config import SnipConfig
from megatron_snip.planning.policies import get_policy


@dataclass(frozen=True)
class ScheduleState:
    """What a checkpoint keeps of the refresh schedule.

    Attributes:
        refreshed: the iteration of the last refresh, or None.
        due_since: if a refresh is due, the iteration from which it was due. A resumed run begins it
            at once. None if no refresh is due.
    """

    refreshed: int | None = None
    due_since: int | None = None


class RefreshSchedule:
    """Which iterations measure the linears.

    Attributes:
        plans_without_statistics: whether the policy needs no statistics. Then it plans before the
            first iteration, and again only if the target changes (by schedule or healing).
        changes_plans: whether refreshes or changes of the target lead to new plans.
        is_waiting: whether a refresh is due and waits until it may begin.
    """

    def __init__(self, config: SnipConfig, num_done: int = 0) -> None:
        """Start before the first refresh that begins after `num_done` iterations."""
        self.plans_without_statistics = not get_policy(config.policy).needs_statistics
        plans_again = config.target_changes or not self.plans_without_statistics
        self.changes_plans = plans_again and not config.collect_only
        self.is_waiting = False
        self._measures = config.collect_only or not self.plans_without_statistics
        self._config = config
        self._refreshed: int | None = None
        self._due_from = self._turn_after(num_done)

    def is_due(self, iteration: int, wanted_at: int | None = None) -> bool:
        """Return whether a refresh should begin with an iteration.

        Args:
            iteration: the iteration that is about to run.
            wanted_at: an iteration from which a refresh is wanted out of turn, or None.
        """
        if not self._measures or iteration < self._config.start_step:
            return False
        if wanted_at is not None and iteration >= wanted_at:
            has_begun_since = self._refreshed is not None and self._refreshed >= wanted_at
            if not has_begun_since:
                return True
        return iteration >= self._due_from

    def begin(self, iteration: int) -> None:
        """Begin a refresh: this iteration measures."""
        self.is_waiting = False
        self._refreshed = iteration
        self._due_from = self._turn_after(iteration)

    def measures(self, iteration: int) -> bool:
        """Whether an iteration measures. One that Megatron repeats measures again."""
        return iteration == self._refreshed

    def wait(self, iteration: int) -> None:
        """Keep a refresh that cannot begin with an iteration due in the next one."""
        self.is_waiting = True
        self._due_from = min(self._due_from, iteration)

    def leave_out(self, iteration: int) -> None:
        """Leave out a refresh whose turn it is; the next one is due after `interval` iterations."""
        self._due_from = self._turn_after(iteration)

    def may_plan_for_new_target(self, iteration: int) -> bool:
        """Return whether a plan for a new target is due before the next refresh begins.

        With start 100, interval 200 and lag 2: before iteration 98 the next refresh is 2 iterations
        away, and the plan is due when it begins; before iteration 99 it would come too late.
        """
        config = self._config
        comes_too_late = self._due_from - iteration < config.lag
        is_in_time = self.plans_without_statistics or not comes_too_late
        return self.changes_plans and config.target_changes and is_in_time

    def _turn_after(self, iteration: int) -> int:
        """Return the first iteration after another one at which a refresh begins by its turn."""
        config = self._config
        if iteration < config.start_step:
            return config.start_step
        return iteration + config.interval - (iteration - config.start_step) % config.interval

    def state_dict(self, iteration: int) -> ScheduleState:
        """Return what a checkpoint after an iteration keeps."""
        is_due = self._measures and self._due_from <= iteration
        return ScheduleState(self._refreshed, self._due_from if is_due else None)

    def load_state_dict(self, state: ScheduleState) -> None:
        """Continue after the last refresh of a stopped run; begin at once one that was due."""
        self._refreshed = state.refreshed
        if state.due_since is not None:
            self._due_from = state.due_since

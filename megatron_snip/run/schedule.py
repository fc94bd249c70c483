"""When a run measures and when it plans; the same on all ranks.

    iteration i           a refresh is due: part 0 of the linears is measured
    i + 1, i + 2, ...     its other parts, one an iteration (`--snip-measure-fraction`)
    last part + lag       the plan of the refresh is applied

`RefreshSchedule` counts iterations. The controller decides whether a refresh that is due may begin:
the optimizer's moments may be too young, or a plan may still be on its way.
"""

from dataclasses import dataclass

from megatron_snip.config import SnipConfig
from megatron_snip.planning.policies import get_policy


@dataclass(frozen=True)
class ScheduleState:
    """What a checkpoint keeps of the schedule.

    Attributes:
        refreshed: the first iteration of the last refresh that began, or None.
    """

    refreshed: int | None = None


class RefreshSchedule:
    """Which iterations measure which part of the linears.

    Attributes:
        plans_without_statistics: whether the policy needs no statistics. Then it plans before the
            first iteration, and again only if the schedule of targets changes the target.
        makes_plans: whether refreshes or changes of the target lead to plans.
        iterations_per_refresh: number of iterations that one refresh measures, each of them a part
            of the linears.
        is_waiting: whether a refresh is due and waits until it may begin.
    """

    def __init__(self, config: SnipConfig) -> None:
        """Start before the first refresh."""
        self.plans_without_statistics = not get_policy(config.policy).needs_statistics
        plans_again = config.has_schedule or not self.plans_without_statistics
        self.makes_plans = plans_again and not config.collect_only
        self.iterations_per_refresh = config.iterations_per_refresh
        self.is_waiting = False
        self._config = config
        self._refreshed: int | None = None

    def is_due(self, iteration: int, wanted_at: int | None = None) -> bool:
        """Return whether a refresh should begin with an iteration.

        Args:
            iteration: the iteration that is about to run.
            wanted_at: an iteration at which a refresh is wanted out of turn, or None.
        """
        config = self._config
        never_measures = self.plans_without_statistics and not config.collect_only
        if never_measures or iteration < config.start_step or self.part(iteration) is not None:
            return False
        is_its_turn = (iteration - config.start_step) % config.interval == 0
        return self.is_waiting or iteration == wanted_at or is_its_turn

    def begin(self, iteration: int) -> None:
        """Begin a refresh with an iteration."""
        self.is_waiting = False
        self._refreshed = iteration

    def wait(self) -> None:
        """Keep a refresh that cannot begin yet due in the next iteration."""
        self.is_waiting = True

    def part(self, iteration: int) -> int | None:
        """Return which part of the linears an iteration measures; None if it measures nothing."""
        part = -1 if self._refreshed is None else iteration - self._refreshed
        return part if 0 <= part < self.iterations_per_refresh else None

    def is_last(self, part: int | None) -> bool:
        """Return whether a part is the last one of its refresh."""
        return part == self.iterations_per_refresh - 1

    def may_plan_for_new_target(self, iteration: int) -> bool:
        """Return whether a plan for a new target is due before the next refresh begins.

        With start 100, interval 200 and lag 2: before iteration 98 the next refresh is 2 iterations
        away, and the plan is due when it begins; before iteration 99 it would come too late.
        """
        config = self._config
        until_refresh = (config.start_step - iteration - 1) % config.interval + 1
        comes_too_late = self.is_waiting or until_refresh < config.lag
        is_in_time = self.plans_without_statistics or not comes_too_late
        return self.makes_plans and config.has_schedule and is_in_time

    def state_dict(self) -> ScheduleState:
        """Return what a checkpoint keeps."""
        return ScheduleState(self._refreshed)

    def load_state_dict(self, state: ScheduleState) -> None:
        """Continue after the refresh of a stopped run."""
        self._refreshed = state.refreshed

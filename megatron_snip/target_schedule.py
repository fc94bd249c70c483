"""The efficiency target over the iterations of a run.

    0:0,200:0.75,9000:0.5     iteration:target; the target holds from that iteration on
    9500:~0                   a ramp: from the point before to this one the target changes linearly

Before the first point the target is `efficiency_target`. A ramp is rounded to equal steps of at
most `RAMP_STEP`, since each change of the target makes a plan. Healing is a ramp to 0 that
ends so early that its last plan still trains.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from megatron_snip.errors import UsageError
from megatron_snip.types import ITERATION_LIMIT

RAMP_STEP = 0.05


class Point(NamedTuple):
    """A point of a target schedule: from an iteration on there is a new target.

    Attributes:
        iteration: The first iteration with the new target.
        target: The new target.
        ramp: Whether the target changes linearly from the point before to this one.
    """

    iteration: int
    target: float
    ramp: bool = False


@dataclass(frozen=True)
class TargetSchedule:
    """The target of every iteration.

    Attributes:
        points: The points in ascending order of iterations; the first one is no ramp.
        heal_from: The iteration at which healing begins, or None.
    """

    points: tuple[Point, ...]
    heal_from: int | None = None

    def at(self, iteration: int) -> float:
        """Return the target of an iteration (Megatron's, 1-based)."""
        num_reached = bisect_right(self.points, iteration, key=lambda point: point.iteration)
        before = self.points[max(num_reached, 1) - 1]
        if num_reached == len(self.points) or not self.points[num_reached].ramp:
            return before.target
        after = self.points[num_reached]
        rise = after.target - before.target
        num_steps = math.ceil(abs(rise) / RAMP_STEP - 1e-9)  # (0.75 - 0.6) / 0.05 is above 3
        num_steps = max(1, num_steps)
        length = after.iteration - before.iteration
        elapsed = iteration - before.iteration
        # The nearest step; in integers, so that halves are rounded up and steps are equally long.
        steps_done = (2 * num_steps * elapsed + length) // (2 * length)
        return round(before.target + rise * steps_done / num_steps, 9)

    def healing(self, begin: int, end: int) -> Self:
        """Return the schedule with a ramp to 0; it takes the place of all points from `begin` on.

        Args:
            begin: the first iteration of the ramp, whose target stays.
            end: the iteration from which on the target is 0.
        """
        before = tuple(point for point in self.points if point.iteration < begin)
        start = Point(begin, self.at(begin))
        return replace(self, points=(*before, start, Point(end, 0.0, ramp=True)), heal_from=begin)


def parse_points(texts: Iterable[str]) -> tuple[Point, ...]:
    """Read `ITERATION:TARGET` and `ITERATION:~TARGET`.

    Raises:
        UsageError: one line, if a point has another form, or iterations do not rise.
    """
    points: list[Point] = []
    for text in texts:
        first, _, second = text.partition(":")
        try:
            point = Point(int(first), float(second.removeprefix("~")), second.startswith("~"))
        except ValueError:
            point = Point(-1, 0.0)
        if point.iteration < 0 or not 0.0 <= point.target <= 1.0:
            known = "ITERATION:TARGET, target from 0 to 1: 200:0.75 (a linear ramp: 200:~0.75)"
            raise UsageError(f"'{text}' is not {known}")
        if point.iteration >= ITERATION_LIMIT:
            raise UsageError(f"'{text}': an iteration must be below 2^53 ({ITERATION_LIMIT})")
        if points and point.iteration <= points[-1].iteration:
            text = f"iteration {point.iteration} follows {points[-1].iteration}"
            raise UsageError(f"{text}; iterations must rise")
        points.append(point)
    return tuple(points)

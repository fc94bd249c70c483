"""The target of every iteration, and healing: it falls to 0, and GEMMs return to high precision.

Healing begins at `--snip-heal-from`, or in the first refresh that finds the weights' gradient below
the noise of the plan (`--snip-heal-below-noise`).

With `--snip-heal-order` `forward` (`backward`) the fprops come first (last). Then options are left
out of the planning problem, so that whatever the policy chooses keeps the order.
"""

import math
from collections.abc import Collection, Mapping

from megatron_snip.config import SnipConfig
from megatron_snip.errors import UsageError
from megatron_snip.formats import get_format
from megatron_snip.options import Option
from megatron_snip.planning.option_table import TOLERANCE
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.planning.problem import LinearChoices, OptionCost, PlanningProblem, parse_option
from megatron_snip.target_schedule import Point, TargetSchedule
from megatron_snip.types import Gemm


def scheduled_targets(config: SnipConfig, train_iters: int | None) -> TargetSchedule:
    """Return the target of every iteration, by the settings.

    Args:
        config: the settings.
        train_iters: the last iteration of the run; None if it is not known.

    Raises:
        UsageError: if healing begins in the last iteration or later, or before a point of the
            target schedule, or if there may be healing and no `train_iters`.
    """
    points = config.points
    if not config.is_scheduled_from_the_start:
        points = (Point(0, config.efficiency_target), *points)
    schedule = TargetSchedule(points)
    for name in ("heal_from", "heal_below_noise"):
        if getattr(config, name) is not None and train_iters is None:
            raise UsageError("the number of iterations is not known", field=name)
    if config.heal_from is None or train_iters is None:
        return schedule
    if config.heal_from < 1:  # a fraction; 0.55 * 100 is 55.00000000000001
        begin = math.ceil(round(config.heal_from * train_iters, 6))
    else:
        begin = math.ceil(config.heal_from)
    end = points[-1].iteration
    if not end < begin < train_iters:
        limits = f"{end} (end of target_schedule) and {train_iters} (of the run)"
        raise UsageError(f"got iteration {begin}, must be between {limits}", field="heal_from")
    return healing_targets(config, schedule, begin, train_iters)


def healing_targets(
    config: SnipConfig, schedule: TargetSchedule, begin: int, train_iters: int
) -> TargetSchedule:
    """Return a schedule whose target falls to 0 from an iteration on.

    Args:
        config: the settings; `lag` is used.
        schedule: the schedule before.
        begin: the iteration.
        train_iters: the last iteration of the run.
    """
    # The target reaches 0 early enough that some iterations run under its plan. At worst a
    # refresh is due just then: its plan takes a lag, and only then can the last plan be asked
    # for, which takes another lag.
    return schedule.healing(begin, max(begin + 1, train_iters - 2 * config.lag - 1))


def begins_below_noise(
    config: SnipConfig, targets: TargetSchedule, iteration: int, noise: float | None
) -> bool:
    """Return whether healing begins because the gradient is below the noise of the plan.

    Args:
        config: settings; `heal_below_noise` is used.
        targets: the target of every iteration; not if they heal already.
        iteration: the iteration of a refresh.
        noise: the gradient noise of the plan in that iteration; None if it is not known.
    """
    limit = config.heal_below_noise
    is_healing = targets.heal_from is not None and iteration >= targets.heal_from
    return not is_healing and limit is not None and noise is not None and noise > limit


def heals_in_order(config: SnipConfig, targets: TargetSchedule, iteration: int) -> bool:
    """Return whether a plan that is applied at an iteration follows the order of healing."""
    is_healing = targets.heal_from is not None and iteration >= targets.heal_from
    return is_healing and config.heal_order != "plan"


def healing_problem(
    problem: PlanningProblem, plan: PrecisionPlan, config: SnipConfig, fixed: Collection[str] = ()
) -> PlanningProblem:
    """Return a problem whose plans lower no GEMM of `plan`, and raise some GEMMs before the others.

    Options are left out. With the order `forward` fprop is the early GEMM, and dgrad and wgrad are
    the late ones; `backward` is the reverse. While the target is at or above the share of the late
    GEMMs, these stay as in `plan`. Below it, the early GEMMs stay above the lowest precision.
    Fixed linears keep all options; so do all linears if `plan` does not reach the target.

    Args:
        problem: a problem with options per GEMM.
        plan: the current plan.
        config: settings; `heal_order` (forward or backward) and formats are used.
        fixed: the linears whose option is fixed.
    """
    # The plan is below the target, for example after a revert: plans that lower no GEMM of it could
    # not reach the target.
    if plan.efficiency < problem.target - float(TOLERANCE):
        return problem
    lowest = get_format(config.lowest_format).bits
    backward = (Gemm.DGRAD, Gemm.WGRAD)
    late = backward if config.heal_order == "forward" else (Gemm.FPROP,)
    usable = _usable(problem)
    late_flops = _late_flops(problem, usable, plan, late, lowest)
    total = sum(row.flops for row in problem.linears)
    # With the early GEMMs all raised, the late ones still save too much: they rise as well.
    late_may_rise = problem.target * total < late_flops

    def may_become(old: Option, new: Option, gemm: Gemm) -> bool:
        """Whether a linear's GEMM may go from its format in `old` to that in `new`."""
        old_bits = get_format(old[gemm]).bits
        new_bits = get_format(new[gemm]).bits
        if new_bits < old_bits:
            return False
        if late_may_rise:
            return new_bits > lowest or gemm in late
        return gemm not in late or new_bits == old_bits

    def allowed(row: LinearChoices) -> dict[str, OptionCost]:
        if row.name in fixed:
            return row.options
        old = plan.linears[row.name]
        raised = {}
        for text, cost in row.options.items():
            new = parse_option(text)
            if text in usable[row.name] and all(may_become(old, new, gemm) for gemm in Gemm):
                raised[text] = cost
        # What it runs now may be forbidden since, and nothing above it measured: a plan out of
        # order is better than none.
        return raised or row.options

    return problem.with_options(allowed)


def _late_flops(
    problem: PlanningProblem,
    usable: Mapping[str, Collection[str]],
    plan: PrecisionPlan,
    late: Collection[Gemm],
    lowest: int,
) -> float:
    """Return the FLOPs of the late GEMMs that can stay in the lowest precision, over all linears.

    Args:
        problem: the linears and their FLOPs, a third of them in each GEMM.
        usable: what `_usable` returns.
        plan: the current plan.
        late: the late GEMMs.
        lowest: bits of the lowest precision.
    """

    def late_bits(option: Option) -> list[int]:
        return [get_format(option[gemm]).bits for gemm in late]

    flops = 0.0
    for row in problem.linears:
        now = late_bits(plan.linears[row.name])
        # Where what the linear has now is forbidden, its late GEMMs rise in any case.
        if any(late_bits(parse_option(text)) == now for text in usable[row.name]):
            flops += row.flops * now.count(lowest) / 3
    return flops


def _usable(problem: PlanningProblem) -> dict[str, set[str]]:
    """Return each linear's options that are not forbidden, for it or for one tied to it."""
    found = {}
    for row in problem.linears:
        costs = row.options.items()
        found[row.name] = {text for text, cost in costs if cost.quality_loss is not None}
    for names in problem.ties:
        found |= dict.fromkeys(names, set.intersection(*(found[name] for name in names)))
    return found

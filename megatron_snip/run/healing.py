"""Healing: towards the end of a run the target falls to 0, and GEMMs return to high precision.

With `--snip-heal-order` `forward` (`backward`) the fprops come first (last). Then options are left
out of the planning problem, so that whatever the policy chooses keeps the order.
"""

from megatron_snip.config import SnipConfig
from megatron_snip.formats import get_format
from megatron_snip.planning.cost import TOLERANCE
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.planning.problem import LinearChoices, OptionCost, PlanningProblem, parse_option
from megatron_snip.planning.restrictions import bits_of
from megatron_snip.target_schedule import TargetSchedule
from megatron_snip.types import Gemm


def heals_in_order(config: SnipConfig, targets: TargetSchedule, iteration: int) -> bool:
    """Return whether a plan that is applied at an iteration follows the order of healing."""
    is_healing = targets.heal_from is not None and iteration >= targets.heal_from
    return is_healing and config.heal_order != "plan"


def healing_problem(
    problem: PlanningProblem, plan: PrecisionPlan, config: SnipConfig
) -> PlanningProblem:
    """Return a problem whose plans lower no GEMM of `plan`, and raise some GEMMs before the others.

    Options are left out. While the target is above the share of the GEMMs that come second, these
    stay as in `plan`. Below it, the GEMMs that come first stay above the lowest precision. Pinned
    linears keep all options; so do all linears if `plan` does not reach the target.

    Args:
        problem: a problem with options per GEMM.
        plan: the current plan.
        config: settings; `heal_order` (forward or backward), pins and formats are used.
    """
    if plan.efficiency < problem.target - float(TOLERANCE):
        return problem
    lowest = get_format(config.lowest_format).bits
    # GEMMs are compared by position: fprop, dgrad, wgrad.
    comes_first = [(gemm == Gemm.FPROP) == (config.heal_order == "forward") for gemm in Gemm]
    current = {name: bits_of(option) for name, option in plan.linears.items()}
    # What the plan saves with the GEMMs that come second. Below that target the GEMMs that come
    # first are all raised, and the others begin.
    second_share = 0.0
    for row in problem.linears:
        pairs = zip(current[row.name], comes_first, strict=True)
        num_low_second = sum(bits == lowest and not first for bits, first in pairs)
        second_share += row.flops * num_low_second / 3
    total = sum(row.flops for row in problem.linears)
    seconds_begin = problem.target * total < second_share

    def may_become(old: int, new: int, first: bool) -> bool:
        """Whether a GEMM may go from `old` to `new` bits; `first`: it comes first."""
        if new < old:
            return False
        if first:
            return new > lowest or not seconds_begin
        return new == old or seconds_begin

    def allowed(row: LinearChoices) -> dict[str, OptionCost]:
        if config.pin_of(row.name) is not None:
            return row.options
        raised = {
            text: cost
            for text, cost in row.options.items()
            if all(map(may_become, current[row.name], bits_of(parse_option(text)), comes_first))
        }
        return raised or row.options

    return problem.with_options(allowed)

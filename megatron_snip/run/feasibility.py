"""Whether any plan satisfies the settings, asked before the first iteration.

A target of the user's that no plan reaches ends the run with an error (`check_settings`). The
default target is lowered to what the linears can reach, with a warning (`reachable_target`). A pin
whose glob matches linears that cannot run its option holds for the others (`runnable_pins`).
"""

import math
from collections.abc import Mapping, Sequence

from megatron_snip.config import SnipConfig
from megatron_snip.errors import InfeasiblePlanError, UsageError, listing, naming_field
from megatron_snip.linears.availability import AvailableOptions
from megatron_snip.options import BF16, Option
from megatron_snip.planning.constraints import make_constraints
from megatron_snip.planning.option_table import make_table
from megatron_snip.planning.policies import get_policy
from megatron_snip.planning.problem import PlanningProblem
from megatron_snip.planning.restrictions import nearest_option, reasons
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.planning.ties import TIED, merged
from megatron_snip.topology import LinearInfo
from megatron_snip.types import glob_matches, has_wildcards, natural_key


def check_settings(problem: PlanningProblem, config: SnipConfig, settings: PlanSettings) -> None:
    """Refuse settings under which no plan can be made.

    Args:
        problem: what every linear can run, at the highest target of the run.
        config: the run's settings.
        settings: the planner's part of them.

    Raises:
        UsageError: if the policy is unknown or has no target to schedule, a pin does not fit the
            model, or the plan file would never run.
        InfeasiblePlanError: if the constraints cannot be met.
    """
    with naming_field("policy"):
        policy = get_policy(config.policy, problem)
        if config.target_changes and not policy.heeds_target:
            raise UsageError(f"'{config.policy}' has no target; drop it or the target schedule")
    makes_plans = not config.collect_only
    if config.plan_file is not None and makes_plans and not policy.needs_statistics:
        raise UsageError(
            f"'{config.policy}' plans before the first iteration, so the plan file would not run; "
            "drop one of them, or add --snip-collect-only to train with the file",
            field="plan_file",
        )
    must_exist = makes_plans and (config.target_changes or policy.needs_statistics)
    with naming_field("pins"):
        check_constraints(problem, settings, must_exist)


def check_constraints(
    problem: PlanningProblem, settings: PlanSettings, must_exist: bool = True
) -> None:
    """Refuse pins that do not fit a problem, and constraints that no plan satisfies.

    Args:
        problem: what every linear can run.
        settings: pins, balance and cost.
        must_exist: whether a plan must exist.

    Raises:
        UsageError: if a pin does not fit.
        InfeasiblePlanError: if the constraints cannot be met.
    """
    merged_problem, _ = merged(problem, settings)
    table = make_table(merged_problem, settings.cost)
    constraints = make_constraints(table, settings, problem.target, None, problem.ties)
    if must_exist:
        constraints.checked_task()


def runnable_pins(
    config: SnipConfig, linears: Sequence[LinearInfo], available: AvailableOptions
) -> tuple[SnipConfig, list[str]]:
    """Return the settings with pins that the linears can run, and warnings.

    A linear that matches a glob and cannot run its option gets the nearest option of no lower
    precision. The glob is then replaced by the names of its linears. A glob whose option no linear
    can run stays, and so does a pin that names a linear: `check_settings` refuses them. A pin of a
    tied linear holds for the linears that it is tied to: those without a pin get one of their own.

    Args:
        config: the run's settings.
        linears: all linears of the model.
        available: what they can run.

    Raises:
        UsageError: for a pin to BF16 of linears that cannot run it.
    """
    tied = {name: names for names in available.ties for name in names}

    def can_run(name: str, option: Option) -> bool:
        refused = available.refusals.get(option, {})
        return not any(each in refused for each in tied.get(name, (name,)))

    def runnable(name: str, option: Option) -> Option:
        if can_run(name, option):
            return option
        job = available.job[name]
        options = [other for other in available.options if can_run(name, other)] or [job]
        nearest = nearest_option(option, options)
        return nearest if nearest in options or can_run(name, BF16) else job

    pins: list[str] = []
    warnings = []
    for pin, (glob, option) in zip(config.pins, config.pin_pairs, strict=True):
        matching = [each.name for each in linears if glob_matches(each.name, glob)]
        unable = [name for name in matching if not can_run(name, option)]
        if option == BF16 and unable:  # no other option has as many bits
            why = reasons({name: available.refusals[BF16].get(name, TIED) for name in unable})
            raise UsageError(f"'{pin}': {listing(unable, 3)} cannot run bf16: {why}", "pins")
        partners = _partners(matching, tied, config)
        if not has_wildcards(glob) or not unable or unable == matching:
            pins.append(pin)
            pins += [f"{name}={option}" for name in partners]
            continue
        found = {name: runnable(name, option) for name in (*matching, *partners)}
        # A linear that runs only the job's own option needs no pin, and the settings may have none.
        allowed = (BF16, *available.options)
        pins += [f"{name}={each}" for name, each in found.items() if each in allowed]
        others = ", ".join(dict.fromkeys(str(found[name]) for name in unable))
        why = reasons({name: available.refusals[option].get(name, TIED) for name in unable})
        warnings.append(
            f"pin {pin}: {len(unable)} of {len(matching)} linears run {others} instead: "
            f"{listing(unable, 3)}: {why}"
        )
    return config.model_copy(update={"pins": tuple(pins)}), warnings


def _partners(
    names: Sequence[str], tied: Mapping[str, Sequence[str]], config: SnipConfig
) -> list[str]:
    """Return the other linears that these are tied to and that no pin matches, in one order."""
    found = {other for name in names for other in tied.get(name, ())} - set(names)
    return sorted((name for name in found if config.pin_of(name) is None), key=natural_key)


def reachable_target(
    config: SnipConfig, linears: Sequence[LinearInfo], available: AvailableOptions
) -> tuple[SnipConfig, list[str]]:
    """Return the settings with a target that the linears can reach, and warnings.

    Only the default target is lowered, and not to 0. A target that the user set stays, and so do
    the settings of a run that makes no plans, whose policy has no target, or whose target schedule
    has one from the first iteration on.

    Args:
        config: the run's settings.
        linears: all linears of the model.
        available: what they can run.
    """
    has_own_target = "efficiency_target" in config.model_fields_set
    if has_own_target or config.is_scheduled_from_the_start or config.collect_only:
        return config, []
    with naming_field("policy"):
        if not get_policy(config.policy).heeds_target:
            return config, []
    warnings = []
    share = _lowered_share(config, available)
    if share < 1.0:
        default = config.efficiency_target
        config = _with_target(config, round(default * share, 6))
        why = f"{default:g} of the {share:.3g} that the options can lower to {config.lowest_format}"
        warnings.append(_warning(config, why))
    best = _best_target(config, linears, available)
    if best is not None and 0 < best < config.efficiency_target:
        former = config.efficiency_target
        config = _with_target(config, math.floor(best * 1e6) / 1e6)
        why = f"the highest that these linears can reach, and not {former:g}"
        warnings.append(_warning(config, why))
    return config, warnings


def _lowered_share(config: SnipConfig, available: AvailableOptions) -> float:
    """Return the largest share of a linear's FLOPs that an option lowers; 1 if time counts.

    Where every option has a GEMM in higher precision, the default target in a plan's FLOPs would
    otherwise be out of reach, or leave the planner no choice.
    """
    if config.cost == "time":
        return 1.0
    return max(option.share_in(config.lowest_format) for option in available.options)


def _best_target(
    config: SnipConfig, linears: Sequence[LinearInfo], available: AvailableOptions
) -> float | None:
    """Return the highest target that the linears reach under the pins.

    None if they reach the target of the settings, or if the pins contradict each other.
    """
    problem = available.problem_without_measurements(linears, config.efficiency_target)
    try:
        with naming_field("pins"):
            check_constraints(problem, PlanSettings(**config.planning_values()))
    except InfeasiblePlanError as error:
        return error.best_target
    return None


def _with_target(config: SnipConfig, target: float) -> SnipConfig:
    return config.model_copy(update={"efficiency_target": target})


def _warning(config: SnipConfig, why: str) -> str:
    return (
        f"the efficiency target is {config.efficiency_target:g}, {why}; "
        "--snip-efficiency-target sets another"
    )

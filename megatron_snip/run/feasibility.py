"""Whether any plan satisfies the settings, asked before the first iteration.

A target of the user's that no plan reaches ends the run with an error (`check_settings`). The
default target is lowered to what the linears can reach, with a warning (`reachable_target`).
"""

from collections import defaultdict

from megatron_snip.config import FREE, SnipConfig
from megatron_snip.divergence.quality_loss import check_divergences
from megatron_snip.errors import InfeasiblePlanError, UsageError, naming_field
from megatron_snip.linears.availability import AvailableOptions
from megatron_snip.linears.te.machine import te_support
from megatron_snip.options import Option
from megatron_snip.planning.constraints import make_constraints
from megatron_snip.planning.fixed import summary
from megatron_snip.planning.option_table import make_table
from megatron_snip.planning.policies import get_policy
from megatron_snip.planning.problem import PlanningProblem
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.planning.ties import merged


def check_settings(
    problem: PlanningProblem,
    config: SnipConfig,
    settings: PlanSettings,
    available: AvailableOptions,
) -> None:
    """Refuse settings under which no plan can be made.

    Args:
        problem: what every linear can run, at the highest target of the run.
        config: the run's settings.
        settings: the planner's part of them.
        available: what the linears can run, and what is fixed.

    Raises:
        UsageError: if the policy or a divergence is unknown, the policy has no target to schedule,
            a pin does not fit the model, or the plan file would never run.
        InfeasiblePlanError: if the constraints cannot be met. It names settings that help.
    """
    with naming_field("policy"):
        policy = get_policy(config.policy, problem)
        if config.target_changes and not policy.heeds_target:
            raise UsageError(f"'{config.policy}' has no target; drop it or the target schedule")
    check_divergences(config)
    makes_plans = not config.collect_only
    if config.plan_file is not None and makes_plans and not policy.needs_statistics:
        raise UsageError(
            f"'{config.policy}' plans before the first iteration, so the plan file would not run; "
            "drop one of them, or add --snip-collect-only to train with the file",
            field="plan_file",
        )
    must_exist = makes_plans and (config.target_changes or policy.needs_statistics)
    try:
        with naming_field("pins"):
            check_constraints(problem, settings, must_exist)
    except InfeasiblePlanError as error:
        text = f"{error}{_advice(problem, available, config, error.best_target or 0.0)}"
        raise InfeasiblePlanError(text, error.conflicts, error.best_target) from None


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
    table = make_table(merged(problem), settings.cost)
    constraints = make_constraints(table, settings, problem.target, None, problem.ties)
    if must_exist:
        constraints.checked_task()


def reachable_target(
    config: SnipConfig, available: AvailableOptions
) -> tuple[SnipConfig, list[str]]:
    """Return the settings with a default target that leaves a choice, and warnings.

    Where the linears cannot all run the lowest precision, the default is a share of what they can
    reach. A target that the user set stays, and so do the settings of a run that makes no plans,
    whose policy has no target, or whose target schedule has one from the first iteration on.

    Args:
        config: the run's settings.
        available: what the linears can run, and what is fixed.

    Raises:
        UsageError: if the options leave no linear a choice.
    """
    has_own_target = "efficiency_target" in config.model_fields_set
    if has_own_target or config.is_scheduled_from_the_start or config.collect_only:
        return config, []
    with naming_field("policy"):
        if not get_policy(config.policy).heeds_target:
            return config, []
    problem = available.problem_without_measurements(target=1.0)
    has_choice = any(
        len(row.options) > 1 and row.name not in available.fixed for row in problem.linears
    )
    if len(available.options) > 1 and not has_choice:
        text = f"nothing is left to plan with --snip-formats {','.join(config.formats)}"
        if available.fixed:
            text += f": {summary(available.fixed, len(problem.linears))}"
        raise UsageError(text + _advice(problem, available, config, 0.0))
    least, best = reachable_range(config, problem, available)
    if best == 0.0:  # `check_settings` refuses it
        return config, []
    default = config.efficiency_target
    target = round(least + default * max(best - least, 0.0), 6)
    if target == default:
        return config, []
    above = f" above the {least:.3g} of fixed linears" if least else ""
    warning = (
        f"the efficiency target is {target:g}, {default:g} of the {best - least:.3g} that linears "
        f"can reach{above}; --snip-efficiency-target sets another"
    )
    return config.model_copy(update={"efficiency_target": target}), [warning]


def reachable_range(
    config: SnipConfig, problem: PlanningProblem, available: AvailableOptions
) -> tuple[float, float]:
    """Return the least efficiency of any plan, and the highest.

    Args:
        config: the run's settings.
        problem: what every linear can run, at target 1.
        available: what the linears can run, and what is fixed.

    Raises:
        UsageError: if a pin does not fit.
    """
    best = 1.0
    try:
        with naming_field("pins"):
            settings = PlanSettings.of(config, pins=available.pins)
            check_constraints(problem, settings)
    except InfeasiblePlanError as error:
        best = error.best_target or 0.0
    least = 0.0  # what fixed linears save in any plan
    if config.cost == "flops":
        flops = {row.name: row.flops for row in problem.linears}
        for name, each in available.fixed.items():
            share = each.option.share_in(config.lowest_format)
            least += flops[name] * share / sum(flops.values())
    return least, best


def _advice(
    problem: PlanningProblem, available: AvailableOptions, config: SnipConfig, reached: float
) -> str:
    """Return which settings let the linears reach a higher target, or an empty text.

    Args:
        problem: the linears.
        available: what they can run, and what is fixed.
        config: the run's settings.
        reached: what these settings reach.
    """
    advice = []
    # Of time no other formats are advised: the target is a share of the seconds that the run's own
    # options can save, and only those were measured.
    others = {} if config.cost == "time" else available.alternatives
    own = {_recipes(option, available) for option in config.options}
    ruled = {name: each for name, each in available.fixed.items() if each.source.is_rule}
    free = [row for row in problem.linears if row.name not in ruled]
    best = ("", reached)
    for formats, (higher, lower) in others.items():
        if {_recipes(higher, available), _recipes(lower, available)} == own:
            continue
        runs = {row.name for row in free if available.why_not(row.name, lower) is None}
        total: dict[int, float] = defaultdict(float)
        gain: dict[int, float] = defaultdict(float)
        for row in problem.linears:
            stage = row.stage if config.pipeline_balance == "stage" else 0
            share = 1.0 if row.name in runs else 0.0
            if row.name in ruled:
                share = ruled[row.name].option.share_in(lower.fprop)
            total[stage] += row.flops
            gain[stage] += row.flops * share
        # Every stage must reach the target, if the stages are balanced.
        shares = [gain[stage] / total[stage] for stage in total if total[stage] > 0]
        least = min(shares, default=0.0)
        can_choose = any(available.why_not(name, higher) is None for name in runs)
        if can_choose and least > best[1] * (1 + 1e-9):
            best = (formats, least)
    if best[0]:
        advice.append(f"--snip-formats {best[0]} reaches {best[1]:.3g}")
    freeable = [name for name, each in ruled.items() if each.source.is_of_the_job]
    if freeable:
        advice.append(
            f"--snip-pins 'GLOB={FREE}' gives linears back that the job's own rules fix, such as "
            f"{freeable[0]}"
        )
    return "".join(f"; {text}" for text in advice)


def _recipes(option: Option, available: AvailableOptions) -> tuple[str, ...]:
    """Return what runs each GEMM of an option: fp8 and mxfp8 may be the same recipe."""
    machine = available.job.machine
    return tuple(te_support(name, machine)[0] or name for name in option.formats)

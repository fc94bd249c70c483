"""Plans and planning problems of another run, made to fit this one.

A plan comes from a file or a checkpoint, a problem from a checkpoint; the run that made them may
have had other settings, another machine or another parallel layout. The settings of this run hold:

    a fixed linear            gets its option (planning/fixed.py)
    other linears             get formats among --snip-formats and bf16, or what the job itself runs
    an option that a linear   is replaced by the nearest one of no lower precision; if the linear
    cannot run                cannot run that one, by what the job itself runs there
    tied linears              get one option, of the most bits
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_snip.config import SnipConfig
from megatron_snip.errors import UsageError
from megatron_snip.linears.auto_formats import RefusalsOf
from megatron_snip.linears.availability import AvailableOptions
from megatron_snip.options import BF16, Option, nearest_option, reasons
from megatron_snip.planning.plan import PrecisionPlan, assigned_plan
from megatron_snip.planning.problem import LinearChoices, OptionCost, PlanningProblem, parse_option
from megatron_snip.planning.ties import TIED


@dataclass(frozen=True)
class Replacement:
    """A linear that cannot have the option of another run's plan here.

    Attributes:
        linear: name of the linear.
        old: the linear's option in the plan.
        new: the option that the linear gets.
        reason: the flag that rules the old one out, or why the linear cannot run it.
        is_setting: whether `reason` is a flag.
    """

    linear: str
    old: Option
    new: Option
    reason: str
    is_setting: bool


def fitted_plan(
    plan: PrecisionPlan, config: SnipConfig, available: AvailableOptions, refusals_of: RefusalsOf
) -> tuple[PrecisionPlan, list[Replacement]]:
    """All ranks: return a plan as this run allows it, and what had to change.

    Its stages are those of this run, and its efficiencies those of this run's stages and lowest
    precision.

    Args:
        plan: a plan of the same linears, of this run or another one.
        config: the settings.
        available: what the linears can run, and what is fixed.
        refusals_of: returns which linears cannot run an option, and why.

    Raises:
        UsageError: if it is a plan of other linears.
    """
    job = available.job
    plan.check_against(job.stage_and_flops)
    # In the model's order: all ranks ask for the same options in the same order.
    fixed_options = [fixed.option for fixed in available.fixed.values()]
    candidates = (*plan.linears.values(), *available.options, *fixed_options, BF16)
    available = replace(available, refusals=refusals_of(candidates))
    replaced = []
    for name, old in plan.linears.items():
        replacement = _replacement(name, old, config, available)
        if replacement is not None:
            replaced.append(replacement)
    linears = {**plan.linears, **{each.linear: each.new for each in replaced}}
    # Replacements can give tied linears different options. (A list: the loop changes `linears`.)
    for replacement in list(_untied(linears, available)):
        replaced.append(replacement)
        linears[replacement.linear] = replacement.new
    fitted = assigned_plan(
        linears,
        job.stage_and_flops,
        lowest_format=config.lowest_format,
        policy=plan.policy,
        iteration=plan.iteration,
        stage_layers=job.stage_layers,
    )
    if replaced:  # it is another plan: what was known of the objective does not hold
        return fitted, replaced
    update: dict[str, Any] = {"stage_layers": job.stage_layers}
    # A plan of this layout that counts seconds has efficiencies that FLOPs do not give.
    if config.cost != "time" or len(plan.stages) != len(fitted.stages):
        update |= {"efficiency": fitted.efficiency, "stages": fitted.stages}
    return plan.model_copy(update=update), []


def _replacement(
    name: str, old: Option, config: SnipConfig, available: AvailableOptions
) -> Replacement | None:
    """Return what a linear gets in place of an option; None if it keeps it."""
    refusals = available.refusals
    can_run = [option for option in available.options if name not in refusals[option]]
    job = available.job.options[name]
    fixed = available.fixed.get(name)
    if fixed is not None and not fixed.source.is_rule:
        fixed = None  # what the linear can run says it more exactly: bf16, for example
    wanted = old if fixed is None else fixed.option
    if name in refusals[wanted]:
        new = nearest_option(wanted, can_run)
        if name in refusals[new]:  # BF16, where a linear's weight is stored in another format
            new = job
        reason = refusals[wanted][name]
        is_setting = False
    elif fixed is not None:
        new = fixed.option
        reason = str(fixed.source)
        is_setting = True
    elif config.allows(old) or old == job:
        return None
    else:
        new = nearest_option(old, can_run)
        reason = "--snip-formats"
        is_setting = True
    return None if new == old else Replacement(name, old, new, reason, is_setting)


def _untied(linears: Mapping[str, Option], available: AvailableOptions) -> Iterator[Replacement]:
    """Yield the replacements that give tied linears one option, of the most bits."""
    refusals = available.refusals
    for names in available.job.ties:
        options = dict.fromkeys(linears[name] for name in names)
        if len(options) == 1:
            continue
        finest = max(options, key=lambda option: option.bits)
        candidates = (*options, *available.options)
        can_run = [o for o in candidates if not any(n in refusals[o] for n in names)]
        new = nearest_option(finest, can_run)
        for name in names:
            if linears[name] != new:
                yield Replacement(name, linears[name], new, TIED, is_setting=False)


def fitted_problem(
    problem: PlanningProblem,
    config: SnipConfig,
    available: AvailableOptions,
    refusals_of: RefusalsOf,
) -> PlanningProblem:
    """All ranks: return a former run's problem with the stages and options of this run.

    Args:
        problem: a problem of the same linears.
        config: the settings.
        available: what the linears can run, and what is fixed.
        refusals_of: returns which linears cannot run an option, and why.

    Raises:
        UsageError: if it is a problem of other linears.
    """
    job = available.job
    if set(problem.names) != set(job.stage_and_flops):
        raise UsageError("the planning problem in the checkpoint is that of another model")
    fixed_options = {fixed.option for fixed in available.fixed.values()}

    def allowed(row: LinearChoices) -> dict[str, OptionCost]:
        """Return the options that the formats allow, or to which a linear is fixed."""
        options = {}
        for text, cost in row.options.items():
            option = parse_option(text)
            if config.allows(option) or option in fixed_options:
                options[text] = cost
        # One that no backward reached has what the job itself runs, also if the formats lack it.
        own = str(job.options[row.name])
        if own in row.options and all(cost.quality_loss is None for cost in options.values()):
            options[own] = row.options[own]
        return options

    rows = []
    for row in problem.linears:
        stage, _ = job.stage_and_flops[row.name]
        rows.append(row.model_copy(update={"stage": stage}))
    problem = problem.model_copy(update={"linears": tuple(rows)})
    options = dict.fromkeys(parse_option(name) for row in rows for name in row.options)
    available = replace(available, refusals=refusals_of(options))
    return available.restrict(problem.with_options(allowed))


def describe(replaced: Sequence[Replacement], num_linears: int) -> list[str]:
    """Return one text for each kind of replacement, with the number of linears."""
    texts = []
    settings = Counter((each.new, each.reason) for each in replaced if each.is_setting)
    for (new, flag), count in settings.items():
        verb = "raised" if flag == "--snip-formats" else "set"
        texts.append(f"{count} of {num_linears} linears {verb} to {new}: {flag}")
    refused: dict[tuple[Option, Option], dict[str, str]] = {}
    for each in replaced:
        if not each.is_setting:
            refused.setdefault((each.old, each.new), {})[each.linear] = each.reason
    for (old, new), why in refused.items():
        texts.append(
            f"{len(why)} of {num_linears} linears run {new} instead of {old}: {reasons(why)}"
        )
    return texts

"""What the linears of a model can run: options by backend, machine and shapes.

    simulate   Megatron's own linears: operands quantized exactly as measured, multiplied in FP32
    te         Transformer Engine's linears under its own recipes, on tensor cores

docs/backends.md has the table. Callers log the texts that are returned.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_snip.config import AUTO, SIMULATED_FORMATS, SnipConfig
from megatron_snip.divergence.quality_loss import unmeasured_problem
from megatron_snip.errors import UnsupportedError
from megatron_snip.linears.model import Job, PlannedModel
from megatron_snip.linears.te.machine import (
    OVERRIDE,
    Machine,
    conflicting_settings,
    forward_only,
    te_support,
    unmeasured_settings,
)
from megatron_snip.linears.te.recipe_table import RECIPES, RunPrecision
from megatron_snip.log import warn_once_per_job
from megatron_snip.options import BF16, Option, formats_in
from megatron_snip.planning.calibration import CalibrationTable, with_seconds
from megatron_snip.planning.fixed import FixedLinears
from megatron_snip.planning.problem import LinearChoices, OptionCost, PlanningProblem
from megatron_snip.planning.restrictions import Refusals, reasons, restrict_problem
from megatron_snip.planning.stage_layers import StageLayers
from megatron_snip.topology import LinearInfo
from megatron_snip.types import glob_matches

logger = logging.getLogger(__name__)


LEAST_CHOICE = 0.5
"""`auto` takes the two lowest formats where linears with at least this share of the FLOPs can run
both of them. The FLOPs are those of linears that nothing fixes."""


def resolve_formats(config: SnipConfig, model: PlannedModel) -> SnipConfig:
    """All ranks: return the settings with the formats that `auto` means for a model.

    Rank 0 logs them, with the recipe of each under Transformer Engine.

    Raises:
        UnsupportedError: on every rank, if Transformer Engine can run BF16 only on this machine.
        UsageError: on every rank, if a pin's option is none of the formats, or a pin matches no
            linear.
    """
    machine = model.machine
    with_te = model.backend == "te"
    run = RunPrecision.of(model.config)
    if run.kind and not with_te:
        warn_once_per_job(
            logger,
            f"snip: simulated linears in a run with {run.flags}: what a plan leaves in bf16 runs "
            f"that instead, in evaluations too; drop --{run.kind}-format",
        )
    formats = config.formats
    if config.formats == (AUTO,):
        formats = SIMULATED_FORMATS
        why = ""
        if with_te:
            formats, why = _best_formats(config, model)
        if model.runtime.topology.rank == 0:
            found = ",".join(formats)
            logger.info("snip: formats auto: %s (backend %s)%s", found, model.backend, why)
    if with_te:
        _log_recipes(formats_in(formats), machine)
        if machine.backward_override:
            formats = _forward_only_formats(formats, machine)
    config = config.model_copy(update={"formats": formats})
    config.check_pins()
    return config


def _best_formats(config: SnipConfig, model: PlannedModel) -> tuple[tuple[str, ...], str]:
    """All ranks: return the formats that `auto` means under Transformer Engine, and why."""
    lowest = two_lowest(te_formats(model.machine))
    if config.collect_only and config.plan_file is None:
        return lowest, ""  # what is measured only may be for another machine
    pairs = _alternatives(model)
    # BF16 is asked with them, as `available_options` does: then it asks nothing again.
    wanted = [option for pair in pairs.values() for option in pair]
    refusals = option_refusals(model, (*wanted, BF16))
    available = AvailableOptions((), refusals, job=model.job)
    free = {
        each.name: each.flops_per_token
        for each in model.all_linears
        if not _is_ruled(each.name, config, model.job)
    }
    total = sum(free.values())

    def share(formats: str) -> float:
        """Return the share of the free linears' FLOPs that can choose between two formats."""
        flops = 0.0
        for name in free:
            if all(available.can_run(name, option) for option in pairs[formats]):
                flops += free[name]
        return flops / total if total else 1.0

    first = ",".join(lowest)
    best = first if share(first) >= LEAST_CHOICE else max(pairs, key=share)
    if best == first:
        return lowest, ""
    why: dict[str, str] = {}
    for option in pairs[first]:
        why |= {name: text for name, text in refusals[option].items() if name in free}
    return tuple(best.split(",")), (
        f": of the FLOPs that nothing fixes only {100 * share(first):.0f} % can choose between "
        f"{first}: {reasons(why)}"
    )


def _is_ruled(name: str, config: SnipConfig, job: Job) -> bool:
    """Return whether a pin or a rule of the job fixes a linear, or one that it is tied to."""

    def is_ruled(each: str) -> bool:
        if any(glob_matches(each, glob) for glob, _ in config.pin_pairs):
            return True
        is_freed = any(glob_matches(each, glob) for glob in config.free_globs)
        return each in job.rules and not is_freed

    return any(map(is_ruled, job.tied_to(name)))


def _option(name: str, machine: Machine) -> Option:
    """Return the option of a single format, as Transformer Engine runs it on a machine."""
    option = Option.uniform(name)
    return forward_only(option) if machine.backward_override else option


def _forward_only_formats(formats: Sequence[str], machine: Machine) -> tuple[str, ...]:
    """Return the formats with dgrad and wgrad in BF16, as they run and count for the target."""
    named = [str(forward_only(Option.parse(entry))) for entry in formats]
    warn_once_per_job(
        logger,
        f"snip: {OVERRIDE}={machine.backward_override} runs dgrad and wgrad in BF16: the formats "
        f"are {','.join(named)}",
        logging.INFO,
    )
    return tuple(dict.fromkeys(named))


def _log_recipes(formats: Sequence[str], machine: Machine) -> None:
    """Log what each format means under Transformer Engine, and what of it cannot be measured."""
    for name in formats:
        recipe, text = te_support(name, machine)
        if recipe and recipe != "bf16":
            warn_once_per_job(logger, f"snip: {name} is {text}", logging.INFO)
    if machine.run.kind and not machine.run_recipe:
        warn_once_per_job(
            logger,
            f"snip: the run's own recipe ({machine.run.flags}) counts as fp8: the linears that the "
            "run gives it keep it where their option is fp8; it is measured as the fp8 above",
        )
    for line in (*conflicting_settings(machine), *unmeasured_settings(formats, machine)):
        warn_once_per_job(logger, f"snip: {line}")


def two_lowest(formats: Sequence[str]) -> tuple[str, ...]:
    """Return what `auto` takes of the formats that can run, the highest precision first.

    With three formats no plan that counts FLOPs would use the middle one: it has an error, and
    saves as little of the lowest precision's FLOPs as the highest one.
    """
    return tuple(formats[-2:])


def te_formats(machine: Machine) -> tuple[str, ...]:
    """Return the formats that Transformer Engine's linears can run, the highest precision first.

    Raises:
        UnsupportedError: if it runs BF16 only.
    """
    support = {name: te_support(name, machine) for name in SIMULATED_FORMATS}
    formats = ("bf16", *(name for name, (recipe, _) in support.items() if recipe))
    if len(formats) == 1:
        raise UnsupportedError(
            f"--snip-formats auto: Transformer Engine runs only bf16 on {machine} "
            f"({'; '.join(text for _, text in support.values())}); "
            "use --snip-backend simulate for fp8,fp4 without speed-up"
        )
    return formats


@dataclass(frozen=True)
class AvailableOptions:
    """What the linears of a model can run; the same on all ranks.

    Attributes:
        options: the options of the settings that some linear can run, in the settings' order.
        refusals: which linears cannot run an option, and why.
        warnings: one line per option that some or all linears cannot run.
        calibration: seconds of every option that is not refused, if time is the objective. Then
            `refusals` has the options that are not faster than BF16 as well.
        job: what the job itself runs.
        lowest_format: the format that the efficiency target counts.
        stage_layers: which layers each pipeline stage holds; None if that is not known.
        fixed: the linears whose option is fixed.
        pins: the rules among them, as the planner reads them.
        alternatives: pairs of formats that Transformer Engine has on this machine, as
            `--snip-formats` has them, with their options; `refusals` has these as well.
    """

    options: tuple[Option, ...]
    refusals: Refusals
    warnings: tuple[str, ...] = ()
    calibration: CalibrationTable | None = None
    job: Job = field(default_factory=lambda: Job({}))
    lowest_format: str = "bf16"
    stage_layers: StageLayers | None = None
    fixed: FixedLinears = field(default_factory=dict)
    pins: tuple[tuple[str, str], ...] = ()
    alternatives: Mapping[str, tuple[Option, Option]] = field(default_factory=dict)

    def can_run(self, name: str, option: Option) -> bool:
        """Return whether a linear, and those that it is tied to, can run an option."""
        refused = self.refusals.get(option, {})
        return not any(each in refused for each in self.job.tied_to(name))

    def problem_without_measurements(
        self, linears: Sequence[LinearInfo], target: float
    ) -> PlanningProblem:
        """Return the problem before any measurement: all quality losses are 0."""
        return self.restrict(unmeasured_problem(linears, self.options, self.lowest_format, target))

    def restrict(self, problem: PlanningProblem) -> PlanningProblem:
        """Return a problem with what linears can run, where they are, and seconds if any."""
        problem = restrict_problem(problem, self.refusals, self.job.options, self.lowest_format)
        problem = problem.with_options(self._with_fixed)
        facts = {"ties": self.job.ties, "pins": self.pins, "stage_layers": self.stage_layers}
        problem = problem.model_copy(update=facts)
        return problem if self.calibration is None else with_seconds(problem, self.calibration)

    def _with_fixed(self, linear: LinearChoices) -> dict[str, OptionCost]:
        """Return a linear's options; the one that it is fixed to is among them, and allowed.

        The job may fix a linear to a format that the settings do not have, so that it is not
        measured. What cannot be chosen has no quality loss that matters.
        """
        options = linear.options
        fixed = self.fixed.get(linear.name)
        if fixed is None:
            return options
        text = str(fixed.option)
        if text in options:
            cost = options[text]
            loss = 0.0 if cost.quality_loss is None else cost.quality_loss
            return {**options, text: cost.model_copy(update={"quality_loss": loss})}
        if fixed.option == BF16 and self.calibration is None:
            return options  # every problem allows a pin to bf16
        scores = dict.fromkeys(next(iter(options.values())).scores, 0.0)
        saving = fixed.option.share_in(self.lowest_format)
        return {**options, text: OptionCost(quality_loss=0.0, saving=saving, scores=scores)}


def available_options(model: PlannedModel, config: SnipConfig) -> AvailableOptions:
    """All ranks: return what the linears can run of the settings' options.

    With `collect_only` and no plan file all options are returned: they are measured for other
    machines.

    Args:
        model: the planned linears.
        config: the settings, with resolved formats.

    Raises:
        UnsupportedError: on every rank, if no linear can run the lowest precision, so that the
            efficiency target would have no meaning.
    """
    job = model.job
    if config.collect_only and config.plan_file is None:
        return AvailableOptions(
            config.options,
            {},
            job=job,
            lowest_format=config.lowest_format,
            stage_layers=model.stage_layers,
        )
    lowest = Option.uniform(config.lowest_format)
    # BF16 too: a pin may give it where the formats do not.
    alternatives = _alternatives(model)
    others = [option for pair in alternatives.values() for option in pair]
    refusals = option_refusals(model, (*config.options, lowest, BF16, *others))
    num_linears = len(model.all_linears)
    options = tuple(o for o in config.options if len(refusals[o]) < num_linears)
    if not any(option.share_in(config.lowest_format) for option in options):
        runs = [
            formats
            for formats, pair in alternatives.items()
            if all(len(refusals[option]) < num_linears for option in pair)
        ]
        like = f", such as {runs[0]}," if runs else ""
        raise UnsupportedError(
            f"no linear of this model can run {lowest}, the lowest precision of --snip-formats: "
            f"{reasons(refusals[lowest])}; choose other formats{like} or use --snip-backend "
            "simulate"
        )
    warnings = []
    if job.ties:
        warnings.append(
            f"the linears of {len(job.ties)} MLPs have one option each, because their operations "
            "are fused"
        )
    for option in config.options:
        refused = refusals[option]
        if refused:
            which = f"{len(refused)} linears" if option in options else "any linear"
            warnings.append(f"{option} is not available to {which}: {reasons(refused)}")
    if model.backend == "te" and model.runtime.microbatch_tokens is None:
        warnings += _about_varying_lengths(options, model.machine)
    return AvailableOptions(
        options,
        refusals,
        tuple(warnings),
        job=job,
        lowest_format=config.lowest_format,
        stage_layers=model.stage_layers,
        alternatives=alternatives,
    )


def _alternatives(model: PlannedModel) -> dict[str, tuple[Option, Option]]:
    """Return the pairs of formats of `AvailableOptions.alternatives`, the lowest pair first."""
    if model.backend != "te":
        return {}
    every = ["bf16", *(name for name in SIMULATED_FORMATS if te_support(name, model.machine)[0])]
    if len(every) < 2:
        return {}
    pairs = dict.fromkeys((two_lowest(every), *(("bf16", name) for name in every[1:])))
    option_of = {name: _option(name, model.machine) for name in every}
    return {",".join(pair): (option_of[pair[0]], option_of[pair[1]]) for pair in pairs}


def _about_varying_lengths(options: Iterable[Option], machine: Machine) -> list[str]:
    """Return at most one line: what the tokens of microbatches must be that SNIP cannot check."""
    recipes = [te_support(name, machine)[0] for option in options for name in option.formats]
    multiple = max((RECIPES[recipe].dim_multiple for recipe in recipes if recipe), default=1)
    if multiple == 1:
        return []
    return [
        f"microbatches vary in length: pad each of them to a multiple of {multiple} tokens on each "
        "rank, or Transformer Engine ends the job at the first one that does not fit"
    ]


def option_refusals(model: PlannedModel, options: Iterable[Option]) -> dict[Option, dict[str, str]]:
    """All ranks, with the same options in the same order: return which linears cannot run them."""
    wanted = list(dict.fromkeys(options))
    unknown = [option for option in wanted if option not in model.refusals]
    if unknown:

        def own_refusals() -> list[dict[str, str]]:
            own: list[dict[str, str]] = []
            for option in unknown:
                reason_of = {linear.name: linear.refusal(option) for linear in model.linears}
                own.append({name: why for name, why in reason_of.items() if why is not None})
            return own

        found: dict[Option, dict[str, str]] = {option: {} for option in unknown}
        control = model.runtime.topology.control
        for rank in control.gather("finding what linears can run", own_refusals).values:
            for option, refused in zip(unknown, rank, strict=True):
                found[option].update(refused)
        model.refusals |= found
    return {option: model.refusals[option] for option in wanted}

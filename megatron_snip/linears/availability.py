"""What the linears of a model can run: options by backend, machine and shapes.

    simulate   Megatron's own linears: operands quantized exactly as measured, multiplied in FP32
    te         Transformer Engine's linears under its own recipes, on tensor cores

docs/backends.md has the table. Callers log the texts that are returned.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from megatron.core.utils import get_model_config
from torch.distributed import ProcessGroup

from megatron_snip.collectives import any_rank, gather_json
from megatron_snip.config import AUTO, SIMULATED_FORMATS, SnipConfig
from megatron_snip.divergence.quality_loss import unmeasured_problem
from megatron_snip.errors import UnsupportedError
from megatron_snip.linears.model import PlannedModel
from megatron_snip.linears.te.gathered_weights import gathers_exact
from megatron_snip.linears.te.machine import (
    OVERRIDE,
    Machine,
    conflicting_settings,
    forward_only,
    te_support,
    this_machine,
    unmeasured_settings,
)
from megatron_snip.linears.te.modules import te_kind, weights_of
from megatron_snip.linears.te.recipe_table import RECIPES, RunPrecision
from megatron_snip.log import warn_once_per_job
from megatron_snip.options import BF16, Option, formats_in
from megatron_snip.planning.calibration import CalibrationTable, with_seconds
from megatron_snip.planning.problem import PlanningProblem
from megatron_snip.planning.restrictions import Refusals, reasons, restrict_problem
from megatron_snip.planning.stage_layers import StageLayers
from megatron_snip.quantizers.stored import is_quantized
from megatron_snip.topology import LinearInfo

logger = logging.getLogger(__name__)


def resolve_formats(
    config: SnipConfig, model: Sequence[torch.nn.Module], control: ProcessGroup | None
) -> SnipConfig:
    """All ranks: return the settings with the formats that `auto` means for a model.

    Rank 0 logs them, with the recipe of each under Transformer Engine.

    Raises:
        UnsupportedError: on every rank, if Transformer Engine can run BF16 only on this machine.
    """
    with_te = any(te_kind(module) is not None for chunk in model for module in chunk.modules())
    with_te = config.backend != "simulate" and any_rank(with_te, control)
    model_config = get_model_config(model[0])
    run = RunPrecision.of(model_config)
    if run.kind and not with_te:
        warn_once_per_job(
            logger,
            f"snip: simulated linears in a run with {run.flags}: what a plan leaves in bf16 runs "
            f"that instead, in evaluations too; drop --{run.kind}-format",
        )
    machine = this_machine(with_te, model_config if with_te else None)
    formats = config.formats
    if config.formats == (AUTO,):
        formats = SIMULATED_FORMATS
        if with_te:
            formats = _best_formats(model, machine, config.collect_only, control)
        backend = "te" if with_te else "simulate"
        if control is None or torch.distributed.get_rank() == 0:
            logger.info("snip: formats auto: %s (backend %s)", ",".join(formats), backend)
    if with_te:
        _log_recipes(formats_in(formats), machine)
        if machine.backward_override:
            formats = _forward_only_formats(formats, machine)
    return config.model_copy(update={"formats": formats})


def _best_formats(
    model: Sequence[torch.nn.Module],
    machine: Machine,
    collect_only: bool,
    control: ProcessGroup | None,
) -> tuple[str, ...]:
    """All ranks: return the formats that `auto` means under Transformer Engine."""
    formats = te_formats(machine)
    if not collect_only:  # what is measured only may be for another machine
        fitting = []
        for name in formats:
            recipe, _ = te_support(name, machine)
            if any_rank(_fits_a_weight(recipe, model, machine), control):
                fitting.append(name)
        formats = tuple(fitting)
    return two_lowest(formats)


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


def _fits_a_weight(recipe: str, model: Sequence[torch.nn.Module], machine: Machine) -> bool:
    """Return whether any linear on this rank has a weight that a recipe can multiply.

    A weight that is stored quantized has only what the run's own recipe or BF16 can multiply,
    unless Megatron gathers it in BF16.
    """
    if recipe in ("bf16", machine.run_recipe):
        return True
    return any(
        gathers_exact(chunk) or not all(map(is_quantized, weights_of(module)))
        for chunk in model
        for module in chunk.modules()
        if te_kind(module) is not None
    )


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
        job: what the job itself runs each linear in.
        ties: groups of linears that must have one option.
        lowest_format: the format that the efficiency target counts.
        stage_layers: which layers each pipeline stage holds; None if that is not known.
    """

    options: tuple[Option, ...]
    refusals: Refusals
    warnings: tuple[str, ...] = ()
    calibration: CalibrationTable | None = None
    job: Mapping[str, Option] = field(default_factory=dict)
    ties: tuple[tuple[str, ...], ...] = ()
    lowest_format: str = "bf16"
    stage_layers: StageLayers | None = None

    def problem_without_measurements(
        self, linears: Sequence[LinearInfo], target: float
    ) -> PlanningProblem:
        """Return the problem before any measurement: all quality losses are 0."""
        return self.restrict(unmeasured_problem(linears, self.options, self.lowest_format, target))

    def restrict(self, problem: PlanningProblem) -> PlanningProblem:
        """Return a problem with what linears can run, where they are, and seconds if any."""
        problem = restrict_problem(problem, self.refusals, self.job, self.lowest_format)
        facts = {"ties": self.ties, "stage_layers": self.stage_layers}
        problem = problem.model_copy(update=facts)
        return problem if self.calibration is None else with_seconds(problem, self.calibration)


def available_options(model: PlannedModel, config: SnipConfig) -> AvailableOptions:
    """All ranks: return what the linears can run of the settings' options.

    With `collect_only` and no plan file all options are returned: they are measured for other
    machines.

    Raises:
        UnsupportedError: on every rank, if no linear can run the lowest precision, so that the
            efficiency target would have no meaning.
    """
    job = model.job_options()
    ties = model.ties()
    if config.collect_only and config.plan_file is None:
        return AvailableOptions(
            config.options,
            {},
            job=job,
            ties=ties,
            lowest_format=config.lowest_format,
            stage_layers=model.stage_layers,
        )
    lowest = Option.uniform(config.lowest_format)
    # BF16 too: a pin may give it where the formats do not.
    refusals = option_refusals(model, (*config.options, lowest, BF16))
    num_linears = len(model.all_linears)
    options = tuple(o for o in config.options if len(refusals[o]) < num_linears)
    if not any(option.share_in(config.lowest_format) for option in options):
        raise UnsupportedError(
            f"no linear of this model can run {lowest}, the lowest precision of --snip-formats: "
            f"{reasons(refusals[lowest])}; choose other formats or use --snip-backend simulate"
        )
    warnings = []
    if ties:
        warnings.append(
            f"the linears of {len(ties)} MLPs have one option each, because their operations are "
            "fused"
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
        ties=ties,
        lowest_format=config.lowest_format,
        stage_layers=model.stage_layers,
    )


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
    distinct = list(dict.fromkeys(options))
    own: list[dict[str, str]] = []
    for option in distinct:
        reason_of = {linear.name: linear.refusal(option) for linear in model.linears}
        own.append({name: why for name, why in reason_of.items() if why is not None})
    found: dict[Option, dict[str, str]] = {option: {} for option in distinct}
    for rank in gather_json(own, model.runtime.topology.control):
        for option, refused in zip(distinct, rank, strict=True):
            found[option].update(refused)
    return found

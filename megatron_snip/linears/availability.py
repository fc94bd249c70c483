"""What the linears of a model can run, why not, and which of them are fixed: the one place.

    simulate   Megatron's own linears: operands quantized exactly as measured, multiplied in FP32
    te         Transformer Engine's linears under its own recipes, on tensor cores

`available_options` joins what is found at other places: the formats that `auto` means
(auto_formats.py), what each linear refuses (te/refusals.py), and the job's own rules (te/job.py).
Whether a plan for the target exists is another question (run/feasibility.py). docs/backends.md has
the table. Callers log the texts that are returned.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatron_snip.config import FREE, SnipConfig
from megatron_snip.divergence.quality_loss import unmeasured_problem
from megatron_snip.errors import UnsupportedError, UsageError, listing
from megatron_snip.linears.auto_formats import Pairs, RefusalsOf, alternatives, resolve_formats
from megatron_snip.linears.job import Job
from megatron_snip.linears.te.machine import Machine, te_support
from megatron_snip.linears.te.recipe_table import RECIPES
from megatron_snip.options import BF16, Option, Refusals, nearest_option, reasons
from megatron_snip.planning.calibration import CalibrationTable, with_seconds
from megatron_snip.planning.fixed import Fixed, FixedLinears, Source, fixed_pins
from megatron_snip.planning.problem import LinearChoices, OptionCost, PlanningProblem, parse_option
from megatron_snip.planning.ties import TIED
from megatron_snip.types import glob_matches


@dataclass(frozen=True)
class AvailableOptions:
    """What the linears of a model can run; the same on all ranks.

    Attributes:
        options: the options of the settings that some linear can run, in the settings' order.
        refusals: which linears cannot run an option, and why.
        warnings: one line per option that some or all linears cannot run, and per rule without
            effect.
        hints: lines about settings that may suit the model better.
        calibration: seconds of every option that is not refused, if time is the objective. Then
            `refusals` has the options that are not faster than BF16 as well.
        job: what the job itself runs.
        lowest_format: the format that the efficiency target counts.
        fixed: the linears whose option is fixed.
        pins: the rules among them, as the planner reads them.
        unused_rules: rules of the job and pins that decide for no linear, each with its source.
        formats_why: why `auto` takes others than the two lowest formats; empty if it does not.
        alternatives: pairs of formats that Transformer Engine has on this machine; `refusals` has
            their options as well.
    """

    options: tuple[Option, ...]
    refusals: Refusals
    warnings: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    calibration: CalibrationTable | None = None
    job: Job = field(default_factory=lambda: Job({}))
    lowest_format: str = "bf16"
    fixed: FixedLinears = field(default_factory=dict)
    pins: tuple[tuple[str, str], ...] = ()
    unused_rules: tuple[str, ...] = ()
    formats_why: str = ""
    alternatives: Pairs = field(default_factory=dict)

    def why_not(self, name: str, option: Option) -> str | None:
        """Return why a linear, or one that it is tied to, cannot run an option; None if it can."""
        refused = self.refusals.get(option, {})
        if name in refused:
            return refused[name]
        return None if refused.keys().isdisjoint(self.job.tied_to(name)) else TIED

    def runnable(self, name: str) -> list[Option]:
        """Return those of the options that a linear, and those that it is tied to, can run."""
        return [option for option in self.options if self.why_not(name, option) is None]

    def problem_without_measurements(self, target: float) -> PlanningProblem:
        """Return the problem before any measurement: all quality losses are 0."""
        linears = self.job.linears
        return self.restrict(unmeasured_problem(linears, self.options, self.lowest_format, target))

    def restrict(self, problem: PlanningProblem) -> PlanningProblem:
        """Return a problem with what linears can run, where they are, and seconds if any.

        A linear that can run none of the problem's options has what the job itself runs.
        """

        def allowed(linear: LinearChoices) -> dict[str, OptionCost]:
            options = {}
            for text, cost in linear.options.items():
                if linear.name not in self.refusals.get(parse_option(text), {}):
                    options[text] = cost
            if not options:
                own = self.job.options.get(linear.name, BF16)
                saving = own.share_in(self.lowest_format) if own != BF16 else 0.0
                options[str(own)] = OptionCost(quality_loss=0.0, saving=saving)
            return self._with_fixed_option(linear.name, options)

        problem = problem.with_options(allowed)
        facts = {
            "ties": self.job.ties,
            "pins": self.pins,
            "stage_layers": self.job.stage_layers,
        }
        problem = problem.model_copy(update=facts)
        return problem if self.calibration is None else with_seconds(problem, self.calibration)

    def _with_fixed_option(
        self, name: str, options: dict[str, OptionCost]
    ) -> dict[str, OptionCost]:
        """Return a linear's options; the one that it is fixed to is among them, and allowed.

        The job may fix a linear to a format that the settings do not have, so that it is not
        measured. What cannot be chosen has no quality loss that matters.
        """
        fixed = self.fixed.get(name)
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


def available_options(
    config: SnipConfig, job: Job, refusals_of: RefusalsOf
) -> tuple[SnipConfig, AvailableOptions]:
    """All ranks: return the settings with the formats that `auto` means, and what linears can run.

    With `collect_only` and no plan file all options are returned: they are measured for other
    machines.

    Args:
        config: the settings.
        job: the job's linears, and what it runs them in.
        refusals_of: returns which linears cannot run an option, and why.

    Raises:
        UnsupportedError: on every rank, if no linear can run the lowest precision, so that the
            efficiency target would have no meaning.
        UsageError: on every rank, if a pin does not fit the linears (`_pinned`).
    """
    config, formats_why = resolve_formats(config, job, refusals_of)
    if config.collect_only and config.plan_file is None:
        found = AvailableOptions(config.options, {}, job=job, lowest_format=config.lowest_format)
        return config, _with_fixed_linears(config, found)
    pairs = alternatives(job)
    lowest = Option.uniform(config.lowest_format)
    others = [option for pair in pairs.values() for option in pair]
    # BF16 too: a pin may give it where the formats do not.
    refusals = refusals_of((*config.options, lowest, BF16, *others))
    num_linears = len(job.linears)
    options = tuple(o for o in config.options if len(refusals[o]) < num_linears)
    if not any(option.share_in(config.lowest_format) for option in options):
        runs = [
            formats
            for formats, pair in pairs.items()
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
    if job.backend == "te" and job.has_varying_tokens:
        warnings += _about_varying_lengths(options, job.machine)
    found = AvailableOptions(
        options,
        refusals,
        tuple(warnings),
        job=job,
        lowest_format=config.lowest_format,
        formats_why=formats_why,
        alternatives=pairs,
    )
    return config, _with_fixed_linears(config, found)


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


# ---- linears whose option is fixed ---------------------------------------------------------------


def _with_fixed_linears(config: SnipConfig, available: AvailableOptions) -> AvailableOptions:
    """Return what the linears can run with the list of what is fixed, and with warnings.

    The first of these that applies to a linear fixes it:

        a pin               its option. A linear that cannot run it, among others that match the
                            glob, gets the nearest option of no lower precision
        a tie to such one   the same option
        a rule of the job   what the job runs there, unless a pin `GLOB=free` matches the linear
        a tie to such one   the same option, also where `GLOB=free` matches
        it is small         what the job runs there, with `--snip-small-linears job`, unless a pin
                            `GLOB=free` matches the linear
        a tie to such one   the same option, also where `GLOB=free` matches
        no other choice     what the job runs there

    Args:
        config: the run's settings.
        available: what the linears can run.

    Raises:
        UsageError: for a pin that matches no linear, whose option no linear that it matches can
            run, or that contradicts another pin; and for a pin to BF16 of linears that cannot run
            it.
    """
    job = available.job
    names = [linear.name for linear in job.linears]
    fixed, warnings = _pinned(config, names, available)
    pinned = set(fixed)
    freed_by = {glob: _matching(names, glob) for glob in config.free_globs}
    freed = {name for matching in freed_by.values() for name in matching}
    for name, rule in job.rules.items():
        if name not in freed:
            fixed.setdefault(name, Fixed(job.options[name], rule))
    _fix_ties(fixed, job, names)
    small, hints = _small(config, available, {*freed, *fixed})
    if config.small_linears == "job":
        fixed |= {name: Fixed(job.options[name], Source.SMALL) for name in small}
        _fix_ties(fixed, job, names)
        hints = ()
    for name in names:
        runs = available.runnable(name)
        if set(runs) <= {job.options[name]} and len(runs) < len(available.options):
            fixed.setdefault(name, Fixed(job.options[name], Source.LIMIT))
    in_order = {name: fixed[name] for name in names if name in fixed}
    unused = [f"{Source.FILE}: {rule}" for rule in job.unused_rules]
    for glob, matching in freed_by.items():
        pin = f"{glob}={FREE}"
        ruled = job.rules.keys() & set(matching)
        tied = [
            name
            for name in matching
            if name in fixed and name not in pinned and fixed[name].source is Source.TIE
        ]
        if ruled <= set(tied):
            unused.append(f"{Source.PIN}: {pin}")
        if tied:
            name = tied[0]
            other = next(o for o in job.tied_to(name) if fixed[o].source is not Source.TIE)
            warnings.append(
                f"{Source.PIN} {pin} does not free {listing(tied, 3)}: the operations of {name} "
                f"are fused with those of {other}, which {fixed[other].source} fixes; free both"
            )
        elif not ruled:
            warnings.append(
                f"{Source.PIN} {pin} frees nothing: no rule of the job fixes such a linear"
            )
    if config.small_linears == "job" and not small:
        unused.append(str(Source.SMALL))
    if job.unused_rules:
        warnings.append(
            f"{len(job.unused_rules)} rules of {Source.FILE} decide for no module of any rank: "
            f"{listing(job.unused_rules, 3)}"
        )
    return replace(
        available,
        fixed=in_order,
        pins=fixed_pins(in_order, names, config.pin_pairs),
        unused_rules=tuple(unused),
        warnings=(*available.warnings, *warnings),
        hints=hints,
    )


def _fix_ties(fixed: dict[str, Fixed], job: Job, names: Sequence[str]) -> None:
    """Fix the linears that are tied to fixed ones, to the same option."""
    for name in names:
        for other in job.tied_to(name):
            if other in fixed:
                fixed.setdefault(name, Fixed(fixed[other].option, Source.TIE))


def _small(
    config: SnipConfig, available: AvailableOptions, decided: Collection[str]
) -> tuple[list[str], tuple[str, ...]]:
    """Return the small linears that a plan may move to the lowest precision, and hints.

    Args:
        config: the run's settings.
        available: what the linears can run.
        decided: linears that the user or the job has decided about.
    """
    job = available.job
    lowest = Option.uniform(config.lowest_format)
    recipe = te_support(lowest.fprop, job.machine)[0] if job.backend == "te" else ""
    if not recipe:  # linears are simulated, or Transformer Engine has no recipe of the format
        return [], ()
    found = {
        name: why
        for name, why in small_linears(job.shard_shapes, recipe).items()
        if name not in decided and available.why_not(name, lowest) is None
    }
    moved = [name for name in found if job.options[name] != lowest]
    if not found or config.cost != "flops" or config.collect_only:
        return moved, ()
    names = list(found)
    remedy = f"{Source.SMALL} keeps what the job runs"
    if not moved:  # the job runs the lowest precision there
        remedy = f"--snip-pins {names[0]}={BF16} takes one out"
    hint = (
        f"{len(names)} linears are small, and {lowest} may be slower there than bf16. --snip-cost "
        f"flops counts them as savings: {listing(names, 3)}; the first has {found[names[0]]}. "
        f"--snip-cost time counts measured seconds, and {remedy}"
    )
    return moved, (hint,)


def small_linears(shapes: Mapping[str, tuple[int, int]], recipe: str) -> dict[str, str]:
    """Return {linear: why a recipe may be slower there than BF16}.

    Experts are left out: their GEMMs run grouped, and no limits are published for these.

    Args:
        shapes: (out_features N, in_features K) of the weight that a rank multiplies, by linear
            (`Job.shard_shapes`).
        recipe: name of a recipe of Transformer Engine; `bf16` is never slower.
    """
    # Quantizing costs time in proportion to the tensors, and a GEMM's gain grows with N and K. The
    # limits (`GemmRecipe.small_shapes`) are those that torchao and torchtitan publish for FP8
    # training on H100, with one scale per tensor and with one per row (pytorch/ao#2410,
    # pytorch/torchtitan#1319). The ones per row stand here for all recipes with smaller tiles, for
    # which no limits are published. They are a hint: `megatron-snip calibrate` and --snip-cost time
    # measure.
    found = {}
    for name, (n, k) in shapes.items():
        for largest_n, largest_k in RECIPES[recipe].small_shapes:
            if n <= largest_n and k <= largest_k and ".experts." not in name:
                limits = {"N": largest_n, "K": largest_k}
                text = " and ".join(f"{d} <= {x:g}" for d, x in limits.items() if x < math.inf)
                found[name] = f"N {n}, K {k} on a rank ({text})"
                break
    return found


def _pinned(
    config: SnipConfig, names: Sequence[str], available: AvailableOptions
) -> tuple[dict[str, Fixed], list[str]]:
    """Return what the pins fix, with the linears that are tied to theirs, and warnings."""
    fixed: dict[str, Fixed] = {}
    pin_of: dict[str, str] = {}

    def fix(name: str, option: Option, pin: str, source: Source) -> None:
        other = pin_of.setdefault(name, pin)
        if fixed.setdefault(name, Fixed(option, source)).option != option:
            text = f"'{other}' and '{pin}' give {name} two options; drop one of them"
            raise UsageError(text, "pins")

    warnings = []
    for glob, option in config.pin_pairs:
        pin = f"{glob}={option}"
        matching = _matching(names, glob)
        reason_of = {name: available.why_not(name, option) for name in matching}
        refused = {name: reason for name, reason in reason_of.items() if reason is not None}
        unable = list(refused)
        why = reasons(refused)
        # A linear that cannot run an option gets one of more bits. None has as many as bf16.
        if unable and (option == BF16 or unable == matching):
            raise UsageError(f"'{pin}': {listing(unable, 3)} cannot run {option}: {why}", "pins")
        found = {name: _nearest(name, option, available) for name in matching}
        for name, runs in found.items():
            fix(name, runs, pin, Source.PIN)
            for other in available.job.tied_to(name):
                fix(other, runs, pin, Source.TIE)
        if unable:
            others = ", ".join(dict.fromkeys(str(found[name]) for name in unable))
            warnings.append(
                f"pin {pin}: {len(unable)} of {len(matching)} linears run {others} instead: "
                f"{listing(unable, 3)}: {why}"
            )
    return fixed, warnings


def _matching(names: Sequence[str], glob: str) -> list[str]:
    """Return the names that match a glob of the pins.

    Raises:
        UsageError: if none does.
    """
    matching = [name for name in names if glob_matches(name, glob)]
    if not matching:
        text = f"'{glob}': no linear's name matches; names look like '{names[0]}'"
        raise UsageError(text, "pins")
    return matching


def _nearest(name: str, option: Option, available: AvailableOptions) -> Option:
    """Return an option for a linear, or the nearest one that it can run of no lower precision."""
    if available.why_not(name, option) is None:
        return option
    job = available.job.options[name]
    options = available.runnable(name) or [job]
    nearest = nearest_option(option, options)
    can_run = nearest in options or available.why_not(name, BF16) is None
    return nearest if can_run else job

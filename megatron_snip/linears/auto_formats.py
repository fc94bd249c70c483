"""Which formats `--snip-formats auto` means for a model, and how Transformer Engine runs them."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from megatron_snip.config import AUTO, AUTO_FORMATS, SnipConfig
from megatron_snip.errors import UnsupportedError
from megatron_snip.linears.job import Job
from megatron_snip.linears.te.machine import (
    OVERRIDE,
    Machine,
    conflicting_variables,
    forward_only,
    te_support,
    unmeasured_variables,
)
from megatron_snip.log import warn_once_per_job
from megatron_snip.options import BF16, Option, Refusals, formats_in, reasons
from megatron_snip.types import glob_matches

logger = logging.getLogger(__name__)

LEAST_CHOICE = 0.5
"""`auto` takes the two lowest formats where linears with at least this share of the FLOPs can run
both of them. The FLOPs are those of linears that nothing fixes."""

RefusalsOf = Callable[[Iterable[Option]], Refusals]
"""All ranks, with the same options in the same order: which linears cannot run them."""

Pairs = Mapping[str, tuple[Option, Option]]
"""Two formats, as `--snip-formats` has them -> their options, the lower one last."""


def resolve_formats(
    config: SnipConfig, job: Job, refusals_of: RefusalsOf
) -> tuple[SnipConfig, str]:
    """All ranks: return the settings with the formats that `auto` means for a job's linears.

    Rank 0 logs them, with the recipe of each under Transformer Engine.

    Returns:
        (settings, why `auto` takes others than the two lowest formats, or an empty text).

    Raises:
        UnsupportedError: on every rank, if Transformer Engine can run BF16 only on this machine.
        UsageError: on every rank, if a pin's option is none of the formats.
    """
    machine = job.machine
    with_te = job.backend == "te"
    if machine.job.kind and not with_te:
        warn_once_per_job(
            logger,
            f"snip: simulated linears in a run with {machine.job.flags}: what a plan leaves in "
            f"bf16 runs that instead, in evaluations too; drop --{machine.job.kind}-format",
        )
    formats = config.formats
    why = ""
    if config.formats == (AUTO,):
        formats = AUTO_FORMATS
        if with_te:
            formats, why = _best_formats(config, job, refusals_of)
        text = f"snip: formats auto: {','.join(formats)} (backend {job.backend})"
        warn_once_per_job(logger, f"{text}: {why}" if why else text, logging.INFO)
    if with_te:
        _log_recipes(formats_in(formats), machine)
        if machine.backward_override:
            # dgrad and wgrad run in BF16; the formats are named as they run and count.
            named = [str(forward_only(Option.parse(entry))) for entry in formats]
            warn_once_per_job(
                logger,
                f"snip: {OVERRIDE}={machine.backward_override} runs dgrad and wgrad in BF16: the "
                f"formats are {','.join(named)}",
                logging.INFO,
            )
            formats = tuple(dict.fromkeys(named))
    config = config.model_copy(update={"formats": formats})
    config.check_pins()
    return config, why


def te_formats(machine: Machine) -> tuple[str, ...]:
    """Return the formats that Transformer Engine's linears can run, the highest precision first.

    Raises:
        UnsupportedError: if it runs BF16 only.
    """
    support = {name: te_support(name, machine) for name in AUTO_FORMATS}
    formats = ("bf16", *(name for name, (recipe, _) in support.items() if recipe))
    if len(formats) == 1:
        raise UnsupportedError(
            f"--snip-formats auto: Transformer Engine runs only bf16 on {machine} "
            f"({'; '.join(text for _, text in support.values())}); "
            "use --snip-backend simulate for fp8,fp4 without speed-up"
        )
    return formats


def alternatives(job: Job) -> Pairs:
    """Return the pairs of formats that Transformer Engine has on this machine, the lowest first."""
    if job.backend != "te":
        return {}
    machine = job.machine
    every = ["bf16", *(name for name in AUTO_FORMATS if te_support(name, machine)[0])]
    if len(every) < 2:
        return {}
    option_of = {}
    for name in every:
        option = Option.uniform(name)
        option_of[name] = forward_only(option) if machine.backward_override else option
    # With three formats no plan that counts FLOPs would use the middle one: it has an error, and
    # saves as little of the lowest precision's FLOPs as the highest one.
    two_lowest = (every[-2], every[-1])
    pairs = dict.fromkeys((two_lowest, *(("bf16", name) for name in every[1:])))
    return {f"{high},{low}": (option_of[high], option_of[low]) for high, low in pairs}


def _best_formats(
    config: SnipConfig, job: Job, refusals_of: RefusalsOf
) -> tuple[tuple[str, ...], str]:
    """All ranks: return the formats that `auto` means under Transformer Engine, and why."""
    te_formats(job.machine)  # refuses a machine that runs BF16 only
    pairs = alternatives(job)
    lowest = next(iter(pairs))
    if config.collect_only and config.plan_file is None:
        return tuple(lowest.split(",")), ""  # what is measured only may be for another machine
    # BF16 is asked with them, as `available_options` does: then it asks nothing again.
    refusals = refusals_of((*(option for pair in pairs.values() for option in pair), BF16))

    def is_ruled(name: str) -> bool:
        """Return whether a pin or a rule of the job fixes a linear."""
        if any(glob_matches(name, glob) for glob, _ in config.pin_pairs):
            return True
        return name in job.rules and not any(glob_matches(name, g) for g in config.free_globs)

    flops_of = {}
    for linear in job.linears:
        if not any(is_ruled(name) for name in job.tied_to(linear.name)):
            flops_of[linear.name] = linear.flops_per_token
    total = sum(flops_of.values())

    def share(formats: str) -> float:
        """Return the share of the free linears' FLOPs that can choose between two formats."""
        refused = {name for option in pairs[formats] for name in refusals[option]}
        can_choose = (refused.isdisjoint(job.tied_to(name)) for name in flops_of)
        flops = sum(f for f, can in zip(flops_of.values(), can_choose, strict=True) if can)
        return flops / total if total else 1.0

    best = lowest if share(lowest) >= LEAST_CHOICE else max(pairs, key=share)
    if best == lowest:
        return tuple(lowest.split(",")), ""
    why: dict[str, str] = {}
    for option in pairs[lowest]:
        why |= {name: text for name, text in refusals[option].items() if name in flops_of}
    return tuple(best.split(",")), (
        f"of the FLOPs that nothing fixes only {100 * share(lowest):.0f} % can choose between "
        f"{lowest}: {reasons(why)}"
    )


def _log_recipes(formats: Sequence[str], machine: Machine) -> None:
    """Log what each format means under Transformer Engine, and what of it cannot be measured."""
    for name in formats:
        recipe, text = te_support(name, machine)
        if recipe and recipe != "bf16":
            warn_once_per_job(logger, f"snip: {name} is {text}", logging.INFO)
    if machine.job.kind and not machine.job_recipe:
        warn_once_per_job(
            logger,
            f"snip: the job's own recipe ({machine.job.flags}) counts as fp8: the linears that the "
            "run gives it keep it where their option is fp8; it is measured as the fp8 above",
        )
    for line in (*conflicting_variables(machine), *unmeasured_variables(formats, machine)):
        warn_once_per_job(logger, f"snip: {line}")

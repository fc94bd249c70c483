"""`megatron-snip plan`: make a plan from a problem file. `pareto` shares the flags.

Exit status: 0 with a plan; 3 if no plan satisfies the constraints (the conflicting ones and the
highest reachable target are named); 2 on bad input.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import get_args

from pydantic import ValidationError
from rich.table import Table

from megatron_snip.cli.common import check_output, integer, new_table, write_output
from megatron_snip.config import FREE, EfficiencyMeasure, PipelineBalance, SnipConfig
from megatron_snip.directory import directory_of
from megatron_snip.errors import InfeasiblePlanError, UsageError, naming_field
from megatron_snip.files import first_problem
from megatron_snip.flags import flag_name
from megatron_snip.formats import lowest_precision
from megatron_snip.options import BF16, Granularity, Option, enumerate_options, formats_in
from megatron_snip.output import console
from megatron_snip.planning.calibration import read_calibration, with_seconds
from megatron_snip.planning.fixed import Fixed, Source
from megatron_snip.planning.plan import PrecisionPlan, read_plan
from megatron_snip.planning.planner import make_plan
from megatron_snip.planning.policies import get_policy, policy_names
from megatron_snip.planning.problem import (
    LinearChoices,
    OptionCost,
    PlanningProblem,
    parse_option,
    read_problem,
)
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.reporting.text import SOLVER_NOISE, column, quality, seconds
from megatron_snip.types import glob_matches, split_linear_name

INFEASIBLE = 3
"""Exit status where no plan satisfies the constraints."""

EXAMPLES = (
    "megatron-snip plan runs/demo/problems/21.json --target 0.9",
    "megatron-snip plan problem.json --pipeline-balance stage --first-layers 1=bf16 --json",
    "megatron-snip plan problem.json --previous plan.json --output next.json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add_planning_flags(parser)
    add = parser.add_argument
    add("--target", metavar="T", help="least efficiency, 0 to 1 [the problem's]")
    add("--previous", metavar="PLAN.json", type=Path, help="the current plan")
    add("--change-penalty", metavar="X", help="quality loss that each changed linear costs [0]")
    add("--output", metavar="FILE", type=Path, help="write the plan to this file")
    add("--json", action="store_true", help="print the plan as JSON, nothing else")


def add_planning_flags(parser: argparse.ArgumentParser) -> None:
    """Add the problem and the flags that set fields of `PlanSettings`."""
    parser.add_argument("problem", metavar="PROBLEM.json", type=Path, help="the problem file")
    add = parser.add_argument_group("constraints").add_argument
    text = "where the target holds. none: over the model. stage: in every pipeline stage [none]"
    add("--pipeline-balance", choices=get_args(PipelineBalance), help=text)
    text = (
        "fix the option of these linears, e.g. 'decoder.layers.0.*=fp8'; may be repeated. Other "
        "linears keep the run's pins, which are in the problem file; GLOB=free gives them to the "
        "planner"
    )
    add("--pin", metavar="GLOB=OPTION", type=_pin, dest="pins", action="append", help=text)
    for which in ("first", "last"):
        text = (
            f"fix the option of the {which} N layers of each block: decoder, encoder and "
            "multi-token prediction"
        )
        add(f"--{which}-layers", metavar="N=OPTION", type=_edge, help=text)
    text = "what efficiency counts: FLOPs in the lowest precision, or seconds saved [flops]"
    add("--cost", choices=get_args(EfficiencyMeasure), help=text)
    text = "seconds for --cost time, from 'megatron-snip calibrate'"
    add("--calibration", metavar="TABLE.json", type=Path, help=text)
    text = (
        "linear: one format a linear. gemm: one for each GEMM, by the statistics of the refresh, "
        "which lie in the run's divergences/ [the problem's options]"
    )
    add("--granularity", choices=get_args(Granularity), help=text)
    text = (
        "loss divergence by which the quality losses are computed again from the statistics of "
        "the refresh: norms, or one of a plugin [the problem's]"
    )
    add("--loss-divergence", metavar="NAME", help=text)
    text = "the same for the weight divergence: norms, or one of a plugin [the problem's]"
    add("--weight-divergence", metavar="NAME", help=text)
    add = parser.add_argument_group("solver").add_argument
    add("--policy", metavar="NAME", help=f"{', '.join(policy_names())} [snip]")
    add("--time-limit", metavar="S", dest="time_limit_s", help="most seconds to solve a plan [30]")
    add("--gap", metavar="F", help="relative gap at which solving stops [0.001]")
    add("--workers", metavar="N", help="threads; 1 is deterministic [1]")
    add("--seed", metavar="N", help="seed of the solver and of 'random', 'random-gemm' [0]")


def run(args: argparse.Namespace) -> int:
    """Plan and print; return the exit status.

    Raises:
        UsageError: for bad input.
    """
    if args.change_penalty is not None and args.previous is None:
        raise UsageError("--change-penalty needs --previous PLAN.json, the current plan")
    if args.output is not None:
        check_output(args.output, (args.problem, args.previous, args.calibration), "plan")
    problem, settings = inputs_from(args)
    heeds_target = get_policy(settings.policy).heeds_target
    for name in ("target", "pipeline_balance", "change_penalty"):
        if not heeds_target and getattr(args, name) not in (None, "none"):
            raise UsageError(
                f"policy '{settings.policy}' has no target and does not use {flag_name('', name)}; "
                "leave that out, or take another policy"
            )
    previous = None
    if args.previous is not None:
        with naming_field("--previous"):
            previous = read_plan(args.previous)
            previous.check_against(problem.names)
    try:
        plan = make_plan(problem, settings, previous, 0)
    except InfeasiblePlanError as error:
        answer = {"version": 1, "status": "infeasible", "conflicts": list(error.conflicts)}
        if args.json:
            print(json.dumps({**answer, "best_target": error.best_target}, indent=1))
        print(f"megatron-snip plan: {error}", file=sys.stderr)
        return INFEASIBLE
    if args.output is not None:
        write_output(args.output, plan.to_json())
    if args.json:
        sys.stdout.write(plan.to_json())
    else:
        console().print(_table(plan, problem, previous))
        _print_summary(plan, problem, settings.cost)
        if args.output is not None:
            print(f"wrote {args.output}")
    return 0


def inputs_from(args: argparse.Namespace) -> tuple[PlanningProblem, PlanSettings]:
    """Return the problem, with the calibration's seconds if there is one, and the settings.

    Raises:
        UsageError: one line that names the flag or the file.
    """
    if args.calibration is not None and args.cost != "time":
        raise UsageError("--calibration holds seconds, which only --cost time counts; add that")
    given = {}
    for name in PlanSettings.model_fields:
        value = getattr(args, name, None)
        if value is not None:
            given[name] = value
    try:
        settings = PlanSettings(**given)
    except ValidationError as error:
        wrong = first_problem(error)
        field = str(wrong.field).partition(".")[0]
        flag = flag_name("", field.removesuffix("_s"))
        text = f"{flag}: {wrong.message}; see 'megatron-snip {args.command} --help'"
        raise UsageError(text) from None
    get_policy(settings.policy)  # an unknown name is an error before any file is read
    problem = read_problem(args.problem)
    pins = (*settings.pins, *_edge_pins(problem, args))
    free_globs = [glob for glob, option in pins if option == FREE]
    pins = tuple(pin for pin in pins if pin[1] != FREE)
    problem = _with_freed_linears(problem, free_globs, pins)
    if args.granularity == "gemm" or args.loss_divergence or args.weight_divergence:
        problem = _by_statistics(problem, args)
    elif args.granularity == "linear":
        problem = _by_linear(problem)
    pins = (*pins, *_pins_of_the_run(problem, pins))
    if args.calibration is not None:
        table = read_calibration(args.calibration)
        problem = with_seconds(_with_pinned_bf16(problem, pins), table)
    return problem, settings.model_copy(update={"pins": pins})


def _by_linear(problem: PlanningProblem) -> PlanningProblem:
    """Return the problem with those options that have one format."""

    def uniform(row: LinearChoices) -> dict[str, OptionCost]:
        found = {k: v for k, v in row.options.items() if len(set(parse_option(k).formats)) == 1}
        if not found:
            raise UsageError(f"--granularity linear: '{row.name}' has no option of one format")
        return found

    return problem.with_options(uniform)


def _by_statistics(problem: PlanningProblem, args: argparse.Namespace) -> PlanningProblem:
    """Return the problem with quality losses from the statistics of the same refresh.

    They are those of a run with the given granularity and divergences. A linear gets the formats of
    its own options.

    Raises:
        UsageError: if the run has no statistics of the refresh, or those of another model, or a
            divergence is unknown.
    """
    # Not at the top: they import torch.
    from megatron_snip.divergence.quality_loss import (
        check_divergences,
        divergence_table,
        planning_problem,
        read_statistics,
    )
    from megatron_snip.reporting.run_record import read_snip_settings

    path: Path = args.problem
    directory = directory_of(path)
    settings = read_snip_settings(directory) or SnipConfig()
    given = {}
    for name in ("loss_divergence", "weight_divergence"):
        value = getattr(args, name)
        if value is not None:
            given[name] = value
    settings = settings.model_copy(update=given)
    check_divergences(settings)
    flag = flag_name("", next(iter(given))) if given else "--granularity gemm"
    file = directory / "divergences" / path.name
    if not file.is_file():
        raise UsageError(
            f"{flag} needs what the refresh measured, '{file}'; name the problem in its run's "
            "directory"
        )
    statistics = read_statistics(file)
    if [linear.name for linear in statistics.linears] != list(problem.names):
        raise UsageError(f"{flag}: '{file}' is of other linears than '{path}'")
    own_options = dict.fromkeys(option for row in problem.linears for option in row.options)
    formats = formats_in(own_options)
    measured_formats = {name for linear in statistics.linears for name in linear.formats}
    lacking = sorted(set(formats) - measured_formats - {str(BF16)})
    if lacking:
        raise UsageError(f"{flag}: '{file}' has no statistics of {', '.join(lacking)}")
    options = tuple(map(parse_option, own_options))
    if args.granularity is not None:
        options = enumerate_options(formats, args.granularity)
    refusals = {}
    for option in options:
        unable = [row.name for row in problem.linears if not _can_run(row, option, args)]
        refusals[option] = dict.fromkeys(unable, "its problem has no such option")
    fixed = {
        name: Fixed(parse_option(option), Source.PIN)
        for glob, option in reversed(problem.pins)
        for name in _matching(problem, glob)
    }
    lowest = lowest_precision(formats).name
    # A linear that no backward reached has one option, which stays.
    kept = {}
    for row in problem.linears:
        open_options = [text for text, cost in row.options.items() if cost.quality_loss is not None]
        if len(open_options) == 1:
            kept[row.name] = parse_option(open_options[0])
    table = divergence_table(statistics, options, lowest, settings, refusals, fixed, job=kept)
    measured = {row.name: row.options for row in planning_problem(table, problem.target).linears}
    refused = {str(option): names for option, names in refusals.items()}

    def of_linear(row: LinearChoices) -> dict[str, OptionCost]:
        found = measured[row.name]
        return {text: cost for text, cost in found.items() if row.name not in refused.get(text, ())}

    return problem.with_options(of_linear)


def _can_run(row: LinearChoices, option: Option, args: argparse.Namespace) -> bool:
    """Return whether a linear has an option; by another granularity, whether it has its formats."""
    if args.granularity is None:
        return str(option) in row.options
    return set(formats_in(row.options)).issuperset(option.formats)


def _edge_pins(problem: PlanningProblem, args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yield the first and last layers of every block as pins."""
    if args.first_layers is None and args.last_layers is None:
        return
    layers_of: dict[str, set[int]] = defaultdict(set)
    for name in problem.names:
        block, layer, _ = split_linear_name(name)
        layers_of[block].add(layer)
    for edge, is_last in ((args.first_layers, False), (args.last_layers, True)):
        if edge is None:
            continue
        count, option = edge
        most = max(map(len, layers_of.values()))
        if count > most:
            flag = "--last-layers" if is_last else "--first-layers"
            raise UsageError(f"{flag}: got {count}; the largest block has {most} layers")
        for block in sorted(layers_of):
            for layer in sorted(layers_of[block], reverse=is_last)[:count]:
                yield f"{block}.layers.{layer}.*", option


def _with_freed_linears(
    problem: PlanningProblem, globs: Sequence[str], given: Sequence[tuple[str, str]]
) -> PlanningProblem:
    """Return the problem without the run's pins of the linears that match a glob.

    Args:
        problem: the problem.
        globs: those of the pins `GLOB=free`.
        given: the other given pins, which go before those of the run.

    Raises:
        UsageError: if a glob frees no linear, or only some of those that are tied.
    """
    if not globs:
        return problem
    pinned = {name for glob, _ in problem.pins for name in _matching(problem, glob)}
    freed: set[str] = set()
    for glob in globs:
        matching = _matching(problem, glob)
        if not matching:
            text = f"no linear's name matches; names look like '{problem.names[0]}'"
            raise UsageError(f"--pin {glob}={FREE}: {text}")
        if pinned.isdisjoint(matching):
            raise UsageError(
                f"--pin {glob}={FREE} frees nothing: the problem file has no pin of such a linear"
            )
        freed.update(matching)
    decided = {name for glob, _ in given for name in _matching(problem, glob)}
    for names in problem.ties:
        still_pinned = (pinned - freed).intersection(names)
        if still_pinned and not freed.isdisjoint(names) and decided.isdisjoint(names):
            raise UsageError(
                f"--pin GLOB={FREE}: the operations of {', '.join(names)} are fused, and the run's "
                f"pins fix {', '.join(sorted(still_pinned))}; free all of them"
            )
    # The run may have fixed a linear to what the job runs, which it did not measure: others have no
    # such option.
    open_options = {
        text for row in problem.linears if row.name not in pinned for text in row.options
    }

    def options(row: LinearChoices) -> dict[str, OptionCost]:
        found = {text: cost for text, cost in row.options.items() if text in open_options}
        return found if found and row.name in freed else row.options

    pins = tuple(_pins_without(problem, freed))
    return problem.with_options(options).model_copy(update={"pins": pins})


def _pins_of_the_run(
    problem: PlanningProblem, given: Sequence[tuple[str, str]]
) -> Iterator[tuple[str, str]]:
    """Yield the pins in the problem file, for linears that no given pin decides.

    Tied linears have one option, so a given pin of one of them decides for all.
    """
    decided = {name for glob, _ in given for name in _matching(problem, glob)}
    for names in problem.ties:
        if not decided.isdisjoint(names):
            decided.update(names)
    return _pins_without(problem, decided)


def _pins_without(problem: PlanningProblem, dropped: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield the pins in the problem file, for linears other than those that are dropped."""
    for glob, option in problem.pins:
        matching = _matching(problem, glob)
        left = [name for name in matching if name not in dropped]
        for each in [glob] if left == matching else left:
            yield each, option


def _matching(problem: PlanningProblem, glob: str) -> list[str]:
    return [name for name in problem.names if glob_matches(name, glob)]


def _with_pinned_bf16(problem: PlanningProblem, pins: Sequence[tuple[str, str]]) -> PlanningProblem:
    """Return the problem with bf16 among the options of linears that a pin gives it.

    It need not be listed where the target counts FLOPs; where it counts seconds, bf16 needs some.
    """
    globs = [glob for glob, option in pins if parse_option(option) == BF16]

    def options(row: LinearChoices) -> dict[str, OptionCost]:
        if str(BF16) in row.options or not any(glob_matches(row.name, glob) for glob in globs):
            return row.options
        return {**row.options, str(BF16): OptionCost(quality_loss=0.0, saving=0.0)}

    return problem.with_options(options)


def _pin(text: str) -> tuple[str, str]:
    return _pair(text, "GLOB=OPTION, e.g. 'decoder.layers.0.*=fp8'")


def _edge(text: str) -> tuple[int, str]:
    count, option = _pair(text, "N=OPTION, e.g. '2=fp8'")
    return integer(count, least=0), option


def _pair(text: str, form: str) -> tuple[str, str]:
    which, _, option = text.rpartition("=")
    if not which or not option:
        raise argparse.ArgumentTypeError(f"'{text}' is not {form}")
    return which, option


def _print_summary(plan: PrecisionPlan, problem: PlanningProblem, cost: EfficiencyMeasure) -> None:
    out = console()
    out.print(
        "quality loss: predicted harm of the option. saving: share of the linear's FLOPs in "
        "the lowest precision. FLOPs: the linear's share of all FLOPs."
    )
    if problem.num_stages > 1:
        stages = sorted({linear.stage for linear in problem.linears})
        found = ", ".join(f"stage {k} {plan.stages[k]:.4f}" for k in stages)
        out.print(f"efficiency by pipeline stage: {found}")
    target = f"target {plan.target:g}" if get_policy(plan.policy).heeds_target else "no target"
    out.print(f"policy        {plan.policy}, {plan.status}, {seconds(plan.seconds)}")
    losses = f"{quality(plan.objective, 6)}, lower bound {quality(plan.bound, 6)}"
    out.print(f"quality loss  {losses}, gap {quality(plan.gap, 2)}")
    out.print(f"efficiency    {plan.efficiency:.6f} of {cost} ({target})")
    out.print(f"digest        {plan.digest}")


def _table(plan: PrecisionPlan, problem: PlanningProblem, previous: PrecisionPlan | None) -> Table:
    text = ("linear", "option") if previous is None else ("linear", "option", "before")
    numbers = ("stage",) if problem.num_stages > 1 else ()
    table = new_table(text, (*numbers, "quality loss", "saving", "FLOPs"))
    total = sum(linear.flops for linear in problem.linears) or 1.0
    bf16 = OptionCost(quality_loss=0.0, saving=0.0)  # need not be listed
    chosen = []
    for linear in problem.linears:
        chosen.append(linear.options.get(str(plan.linears[linear.name]), bf16))
    losses = column([cost.quality_loss for cost in chosen], SOLVER_NOISE)
    savings = column([cost.saving for cost in chosen])
    for linear, loss, saving in zip(problem.linears, losses, savings, strict=True):
        option = plan.linears[linear.name]
        row = [linear.name, str(option)]
        if previous is not None:
            before = previous.linears[linear.name]
            row.append("" if before == option else str(before))
        row += [str(linear.stage)] * len(numbers)
        table.add_row(*row, loss, saving, f"{100 * linear.flops / total:.1f}%")
    return table

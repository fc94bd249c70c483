"""`megatron-snip import`: a plan from Megatron's own precision file.

The file's globs are matched against the linears of a problem (one that a run wrote, e.g. with
`--snip-collect-only`), as Megatron matches them against its modules: the first match decides. Which
layers a pipeline stage holds is taken from the flags, else from an exported file, else from the
problem.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from megatron_snip.cli.common import check_output, write_output
from megatron_snip.cli.pipeline_flags import add_stage_flags, stage_layers_from
from megatron_snip.errors import UsageError, listing
from megatron_snip.files import read_yaml
from megatron_snip.formats import lowest_precision
from megatron_snip.linears.te.precision_config import PrecisionFile
from megatron_snip.options import BF16, Option
from megatron_snip.planning.checker import broken_rules
from megatron_snip.planning.option_table import TOLERANCE
from megatron_snip.planning.plan import PrecisionPlan, assigned_plan
from megatron_snip.planning.problem import PlanningProblem, parse_option, read_problem
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.planning.stage_layers import StageLayers

EXAMPLES = (
    "megatron-snip import OUT.yaml --problem runs/demo/problems/21.json --output plan.json",
    "megatron-snip import A.stage0.yaml A.stage1.yaml --problem P.json --output plan.json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add = parser.add_argument
    text = "what --te-precision-config-file takes: one file, or one a pipeline stage in order"
    add("files", metavar="FILE.yaml", type=Path, nargs="+", help=text)
    text = "names and sizes of the model's linears: problems/<iteration>.json of a run"
    add("--problem", metavar="PROBLEM.json", type=Path, required=True, help=text)
    text = "option of the linears that the file does not name, such as fp8 or nvfp4 [bf16]"
    add("--base", metavar="OPTION", default="bf16", help=text)
    text = "experts are modules of their own (no --moe-grouped-gemm)"
    add("--sequential-experts", action="store_true", help=text)
    add("--output", metavar="PLAN.json", type=Path, required=True, help="where the plan goes")
    add_stage_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Make the plan and print it; return 0.

    Raises:
        UsageError: for bad input, or recipes that are no format of a plan.
    """
    check_output(args.output, (*args.files, args.problem), "plan")
    problem = read_problem(args.problem)
    files = [PrecisionFile(read_yaml(path), f"'{path}'") for path in args.files]
    base = Option.parse(args.base)
    linears, warnings = recipe_of(files, problem, args, base)
    for warning in warnings:
        print(f"warning: {warning}")
    formats: dict[str, None] = {}
    for option in linears.values():
        formats |= dict.fromkeys(option.formats)
    quantized = tuple(name for name in formats if name != "bf16")
    lowest = lowest_precision(quantized or ("fp8",))
    stage_and_flops = {each.name: (each.stage, each.flops) for each in problem.linears}
    plan = assigned_plan(
        linears, stage_and_flops, lowest.name, "imported", stage_layers=problem.stage_layers
    )
    for warning in check_plan(plan, problem):
        print(f"warning: {warning}")
    write_output(args.output, plan.to_json())
    for text, count in Counter(map(str, plan.linears.values())).most_common():
        print(f"  {text}: {count} linears")
    print(f"share of FLOPs in the lowest precision: {plan.efficiency:.4f}")
    if base == BF16 and any(file.follows_the_job() for file in files):
        print(
            "warning: the file leaves linears in the job's own precision, which is taken as bf16; "
            "give --base fp8 for a run with --fp8-format"
        )
    if any(file.has_evaluation_recipes() for file in files):
        print(
            "warning: evaluation recipes are left out: a plan holds in training and evaluation; "
            "--snip-eval-precision bf16 evaluates in BF16"
        )
    if any(file.stores_weights() for file in files):
        print(
            "fp8_param and fp4_param are left out: a plan does not say how weights are stored, "
            "Megatron's flags do; export --fp8-param writes them again"
        )
    print(f"wrote {args.output}")
    return 0


def check_plan(plan: PrecisionPlan, problem: PlanningProblem) -> list[str]:
    """Check a file's plan against what the problem's run obeys; return warnings.

    The target and the formats are the coming run's, so only warnings are about them.

    Raises:
        UsageError: if the plan breaks pins or ties, or has an option that the problem forbids.
    """
    listed = {parse_option(option) for row in problem.linears for option in row.options}
    unlisted: dict[Option, list[str]] = {}
    for row in problem.linears:
        option = plan.linears[row.name]
        if option not in map(parse_option, row.options):
            unlisted.setdefault(option, []).append(row.name)
    # The layers of the stages come from the flags and the files as well, so they may be others.
    own = problem.model_copy(update={"stage_layers": plan.stage_layers})
    faults = broken_rules(plan, own, PlanSettings(pins=problem.pins), unlisted)
    if faults:
        raise UsageError(
            f"the file breaks rules of the problem's run: {listing(faults, 3)}; "
            "change the file, or give a problem of a run without these rules"
        )
    warnings = []
    new = [str(option) for option in unlisted if option not in {BF16, *listed}]
    if new:
        warnings.append(
            f"the problem did not measure {listing(new)}: a run with this plan needs these in "
            "--snip-formats"
        )
    for option in listed.intersection(unlisted):
        names = unlisted[option]
        warnings.append(
            f"the problem has no {option} for {listing(names, 3)}: a run with this plan gives "
            f"{'it' if len(names) == 1 else 'them'} another option, and says so"
        )
    if plan.efficiency < problem.target - float(TOLERANCE):
        warnings.append(
            f"the share is below the problem's target of {problem.target:g}: a run keeps the plan "
            "until its first refresh, or with --snip-collect-only"
        )
    return warnings


def recipe_of(
    files: Sequence[PrecisionFile],
    problem: PlanningProblem,
    args: argparse.Namespace,
    base: Option,
) -> tuple[dict[str, Option], list[str]]:
    """Return what Megatron would give every linear of a problem, and warnings.

    Args:
        files: one file for all pipeline stages, or one for each.
        problem: the linears, and perhaps which layers each stage holds.
        args: the flags of `add_stage_flags`, and `sequential_experts`.
        base: the option of linears that no file names.

    Raises:
        UsageError: if the files do not fit the pipeline, or a recipe is no format of a plan.
    """
    known = _common_stage_layers(files) or problem.stage_layers
    stage_layers = stage_layers_from(args, problem.names, known, problem.num_stages)
    file_of_stage = _by_stage(files, stage_layers.num_stages)
    places = stage_layers.local_names(problem.names)
    linears: dict[str, Option] = {}
    for name, (stage, local) in places.items():
        linears[name] = file_of_stage[stage].option(local, base, args.sequential_experts)
    warnings = []
    for file in files:
        unmatched = file.unmatched(
            local for stage, local in places.values() if file_of_stage[stage] is file
        )
        if unmatched:
            warnings.append(
                f"{file.source}: {len(unmatched)} of {len(file.matchers)} matchers fit no linear "
                f"of the problem: {listing(unmatched, 3)}"
            )
    return linears, warnings


def _common_stage_layers(files: Sequence[PrecisionFile]) -> StageLayers | None:
    """Return the layers of each stage that exported files name; None if they name none.

    Raises:
        UsageError: if two files name different ones.
    """
    first = files[0]
    for file in files:
        if file.stage_layers != first.stage_layers:
            raise UsageError(
                f"{first.source} and {file.source} are not of one pipeline: their stage_layers "
                "differ; give the files of one export"
            )
    return first.stage_layers


def _by_stage(files: Sequence[PrecisionFile], num_stages: int) -> list[PrecisionFile]:
    """Return the file of each pipeline stage; one file that names no stage is that of all.

    Raises:
        UsageError: if a stage has no file, or several.
    """
    if len(files) == 1 and files[0].stage is None:
        return [files[0]] * num_stages
    found: dict[int, PrecisionFile] = {}
    for place, file in enumerate(files):
        stage = place if file.stage is None else file.stage
        other = found.setdefault(stage, file)
        if other is not file:
            raise UsageError(
                f"{other.source} and {file.source} are both of pipeline stage {stage}; give one "
                "file for each stage"
            )
    missing = [str(stage) for stage in range(num_stages) if stage not in found]
    if missing or len(files) != num_stages:
        given = listing([f"{file.source} is of stage {stage}" for stage, file in found.items()], 3)
        if missing:
            given += f"; the files of stages {listing(missing, 8)} are missing"
        raise UsageError(
            f"{len(files)} files for {num_stages} pipeline stages: {given}; give one file, or one "
            "for each (--pipeline-stages changes their number)"
        )
    return [found[stage] for stage in range(num_stages)]

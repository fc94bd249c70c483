"""`megatron-snip export`: a plan for other programs.

te-precision   recipes of Transformer Engine's linears (docs/backends.md): Megatron-LM reads them
               with `--te-precision-config-file`, without SNIP; recipes per GEMM need this package
torchtitan     lists of fully qualified names for torchtitan's and torchao's filters (JSON)
modelopt       `hf_quant_config.json` of ModelOpt, which vLLM and other servers read
yaml           {linear: option}

translations.py has the names and formats of torchtitan and ModelOpt.
"""

import argparse
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from megatron_snip.cli.common import capability, check_output, write_output
from megatron_snip.cli.pipeline_flags import add_stage_flags, stage_layers_from
from megatron_snip.cli.translations import modelopt_config, torchtitan_filters
from megatron_snip.errors import UsageError
from megatron_snip.flags import flag_name
from megatron_snip.formats import FORMATS
from megatron_snip.linears.te.machine import Machine, te_recipe, this_machine
from megatron_snip.linears.te.precision_config import (
    config_text,
    export_configs,
    stage_paths,
)
from megatron_snip.linears.te.recipe import TERecipe, needed_precision
from megatron_snip.linears.te.recipe_table import RECIPES, JobPrecision
from megatron_snip.linears.te.refusals import te_refusal
from megatron_snip.options import Option, nearest_option
from megatron_snip.output import yaml_text
from megatron_snip.planning.plan import PrecisionPlan, read_plan

EXAMPLES = (
    "megatron-snip export runs/demo/plans/21.json --capability 10.0 --output OUT.yaml",
    "megatron-snip export runs/demo/plans/21.json --to torchtitan --output filters.json",
)

_TRANSLATIONS = {"torchtitan": torchtitan_filters, "modelopt": modelopt_config}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add = parser.add_argument
    add("plan", metavar="PLAN.json", type=Path, help="the plan")
    text = "te-precision: for Megatron's --te-precision-config-file. yaml: {linear: option}"
    formats = ("te-precision", *_TRANSLATIONS, "yaml")
    add("--to", choices=formats, default="te-precision", help=f"{text} [te-precision]")
    text = "the file to write; OUT.stage0.yaml and so on if pipeline stages need different ones"
    add("--output", metavar="OUT", type=Path, required=True, help=text)
    text = "te-precision: compute capability of the GPUs, such as 9.0 (Hopper) [this machine's]"
    add("--capability", metavar="X.Y", type=capability, help=text)
    text = "te-precision: what fp8 means, the run's --fp8-recipe [the best of the GPU]"
    add("--fp8-recipe", choices=_values("fp8", "recipe"), help=text)
    text = "te-precision: with --fp8-recipe, the run's --fp8-format [e4m3]"
    add("--fp8-format", choices=_values("fp8", "format"), help=text)
    text = "te-precision: what fp4 means, the run's --fp4-recipe [the best of the GPU]"
    add("--fp4-recipe", choices=_values("fp4", "recipe"), help=text)
    text = (
        "te-precision: store a weight in FP8 or FP4 if all three GEMMs run that (fp8_param and "
        "fp4_param of Megatron-Core 0.19); only for a run with --fp8-param-gather or "
        "--fp4-param-gather"
    )
    add("--fp8-param", action="store_true", help=text)
    text = (
        "replace options that the program cannot run by the nearest with at least as many bits, "
        "and leave linears that it has no name for in BF16"
    )
    add("--nearest", action="store_true", help=text)
    add_stage_flags(parser)


def _values(kind: str, field: str) -> tuple[str, ...]:
    """Return what a run's `--fp8-recipe`, `--fp8-format` and so on can be."""
    runs = [recipe.precision for recipe in RECIPES.values() if recipe.precision.kind == kind]
    return tuple(dict.fromkeys(getattr(run, field) for run in runs))


def run(args: argparse.Namespace) -> int:
    """Write the files and print what they hold; return 0.

    Raises:
        UsageError: for bad input, or options that cannot run on these GPUs.
    """
    check_output(args.output, (args.plan,))
    plan = read_plan(args.plan)
    about = f"The {plan.policy} plan of iteration {plan.iteration} (digest {plan.digest[:12]})"
    if args.to == "te-precision":
        return _export_precision_file(plan, about, args)
    of_the_run = ("fp8_recipe", "fp8_format", "fp4_recipe")
    for flag in ("capability", *of_the_run, "fp8_param", "pipeline_stages", "chunk_layers"):
        if getattr(args, flag) not in (None, False):
            raise UsageError(f"{flag_name('', flag)} is for --to te-precision; leave it out")
    if args.to == "yaml":
        if args.nearest:
            raise UsageError("--nearest is for programs that lack an option; --to yaml lacks none")
        options = {name: str(option) for name, option in plan.linears.items()}
        text = yaml_text(options, [about])
    else:
        content, changes = _TRANSLATIONS[args.to](plan.linears)
        _check_changes(changes, args)
        text = json.dumps(content, indent=1) + "\n"
    write_output(args.output, text)
    print(f"wrote {args.output}: {len(plan.linears)} linears")
    return 0


def _check_changes(changes: Sequence[str], args: argparse.Namespace) -> None:
    if changes and not args.nearest:
        text = f"{args.to} cannot express the plan: {'; '.join(changes)}"
        raise UsageError(f"{text}; give --nearest to accept that")
    for line in changes:
        print(f"warning: {line}")


def _export_precision_file(plan: PrecisionPlan, about: str, args: argparse.Namespace) -> int:
    capability = args.capability or this_machine(with_te=False).capability
    if capability is None:
        raise UsageError(
            "this machine has no GPU; give the GPUs' capability: --capability 9.0 (Hopper) or 10.0 "
            "(Blackwell)"
        )
    machine = Machine(capability, te_version="any", job=_job_precision(args))
    recipes, changes = _recipes(plan, machine)
    stage_layers = stage_layers_from(
        args, list(plan.linears), plan.stage_layers, num_stages=len(plan.stages)
    )
    configs = export_configs(plan.linears, recipes, stage_layers, args.fp8_param)
    _check_changes(changes, args)
    paths = stage_paths(args.output, len(configs))
    for path in paths:
        check_output(path, (args.plan,))
    comment = (
        f"{about} for",
        f"Transformer Engine on {machine}; read by Megatron's",
        "--te-precision-config-file.",
    )
    for stage, (path, config) in enumerate(zip(paths, configs, strict=True)):
        write_output(path, config_text(config, comment, needed_precision(recipes.values()).flags))
        found = f"wrote {path}: {len(config['matchers'])} matchers"
        print(found if len(paths) == 1 else f"{found} of {_described(stage_layers.root[stage])}")
    for option, recipe in recipes.items():
        count = sum(other == option for other in plan.linears.values())
        print(f"  {option}: {recipe} ({count} linears)")
    if not all(recipe.is_uniform for recipe in recipes.values()):
        print("Recipes that differ by GEMM need megatron-snip installed where the job runs.")
    if len(paths) > 1:
        print(
            f"There is one file for each of {len(paths)} pipeline stages (change it with "
            "--pipeline-stages and --chunk-layers). Give each rank the file of its stage."
        )
    _print_required_flags(recipes.values(), paths, args.fp8_param)
    return 0


def _described(chunks: Iterable[Mapping[str, int]]) -> str:
    """Return the first and last layer of each model chunk of a stage, as text."""
    spans = []
    for chunk in chunks:
        layers = list(chunk)
        spans.append(f"{layers[0]} to {layers[-1]}" if layers else "no layers")
    return " and ".join(spans)


def _job_precision(args: argparse.Namespace) -> JobPrecision:
    """Return the job's own low precision, as the flags say; BF16 without them."""
    if args.fp8_format is not None and args.fp8_recipe is None:
        raise UsageError("--fp8-format needs --fp8-recipe; give both as the run has them")
    if args.fp8_recipe is not None and args.fp4_recipe is not None:
        raise UsageError("--fp8-recipe and --fp4-recipe: a run has one of them; leave one out")
    if args.fp8_recipe is not None:
        return JobPrecision("fp8", args.fp8_format or "e4m3", args.fp8_recipe)
    if args.fp4_recipe is not None:
        return JobPrecision("fp4", "e2m1", args.fp4_recipe)
    return JobPrecision()


def _print_required_flags(
    recipes: Iterable[TERecipe], paths: Sequence[Path], stores_weights: bool
) -> None:
    needed = needed_precision(recipes)
    file = shlex.quote(str(paths[0])) + ("  # of its stage" if len(paths) > 1 else "")
    flags = ["--transformer-impl transformer_engine", "--bf16", needed.flags]
    flags.append(f"--te-precision-config-file {file}")
    print("The run needs:")
    for flag in flags:
        if flag:
            print(f"  {flag}")
    if needed.kind:
        print(
            f"--{needed.kind}-format is needed: without it Megatron-Core before 0.19 quantizes\n"
            "weights only in the first iteration, and no release pads the tokens of experts."
        )
        advice = "Do not add --fp8-param-gather or --fp4-param-gather."
        if stores_weights:
            advice = f"With --{needed.kind}-param-gather weights are stored as the file says."
        print(advice)
    others = "run in the job's own precision" if needed.kind else "stay in BF16"
    print(f"Linears that the plan does not name {others}.")


def _recipes(plan: PrecisionPlan, machine: Machine) -> tuple[dict[Option, TERecipe], list[str]]:
    """Return the recipe of every option of the plan, and a line for each replaced option."""
    uniform = [Option.uniform(name) for name in FORMATS]
    recipes = {}
    changes = []
    for option in dict.fromkeys(plan.linears.values()):
        runnable = [each for each in (option, *uniform) if te_refusal(each, machine) is None]
        instead = nearest_option(option, runnable)
        recipes[option] = te_recipe(instead, machine)
        if instead != option:
            changes.append(f"{option} becomes {instead}: {te_refusal(option, machine)}")
    return recipes, changes

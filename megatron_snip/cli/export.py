"""`megatron-snip export`: a plan for other programs.

te-precision   recipes of Transformer Engine's linears (docs/backends.md): Megatron-LM reads them
               with `--te-precision-config-file`, without SNIP; recipes per GEMM need this package
torchtitan     lists of fully qualified names for torchtitan's and torchao's filters (JSON)
modelopt       `hf_quant_config.json` of ModelOpt, which vLLM and other servers read
yaml           {linear: option}

torchtitan and Hugging Face models (ModelOpt, vLLM) split Megatron's fused linears: `linear_qkv`
into query, key and value, `linear_fc1` into gate and up projection. The export has no names for
routed experts and multi-token prediction. Sources: torchtitan's state_dict_adapter.py of Llama 3
and DeepSeek V3 (0.2.2 has wq, wk and wv without `qkv_linear`), ModelOpt 0.47's
`process_layer_quant_config`.
"""

import argparse
import bisect
import itertools
import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_snip.cli.common import check_output, integer, write_output
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
from megatron_snip.linears.te.recipe_table import RECIPES, GemmRecipe, JobPrecision
from megatron_snip.linears.te.refusals import te_refusal
from megatron_snip.options import BF16, Option, nearest_option
from megatron_snip.output import yaml_text
from megatron_snip.planning.plan import PrecisionPlan, read_plan
from megatron_snip.planning.stage_layers import StageLayers, outer_layer
from megatron_snip.types import split_linear_name
from megatron_snip.version import __version__

EXAMPLES = (
    "megatron-snip export runs/demo/plans/21.json --capability 10.0 --output OUT.yaml",
    "megatron-snip export runs/demo/plans/21.json --to torchtitan --output filters.json",
)

_PARENTS = {
    "self_attention": ("attention", "self_attn"),
    "mlp": ("feed_forward", "mlp"),
    "mlp.shared_experts": ("moe.shared_experts", "mlp.shared_experts"),
}
# torchtitan has `wq`, `wk` and `wv` up to 0.2.2, and `qkv_linear` later. Both are listed: a name
# that a model does not have matches nothing.
_LINEARS = {
    "linear_qkv": ("qkv_linear wq wk wv", "q_proj k_proj v_proj"),
    "linear_q_proj": ("wq", "q_proj"),
    "linear_q_down_proj": ("wq_a", "q_a_proj"),
    "linear_q_up_proj": ("wq_b", "q_b_proj"),
    "linear_kv_down_proj": ("wkv_a", "kv_a_proj_with_mqa"),
    "linear_kv_up_proj": ("wkv_b", "kv_b_proj"),
    "linear_proj": ("wo", "o_proj"),
    "linear_fc1": ("w1 w3", "gate_proj up_proj"),
    "linear_fc2": ("w2", "down_proj"),
}
"""Megatron's name -> torchtitan's and Hugging Face's."""


def _known_recipes() -> dict[str, GemmRecipe]:
    """Return {format: its first recipe} of the formats that torchtitan and ModelOpt have."""
    known: dict[str, GemmRecipe] = {}
    for recipe in RECIPES.values():
        if recipe.converter:
            for name in recipe.formats:
                known.setdefault(name, recipe)
    return known


_KNOWN_RECIPES = _known_recipes()
_TORCHTITAN_CONVERTERS = {name: recipe.converter for name, recipe in _KNOWN_RECIPES.items()}
"""torchtitan's converter, by the format."""
_MODELOPT_PARAMETERS = {name: recipe.modelopt for name, recipe in _KNOWN_RECIPES.items()}
"""ModelOpt's parameters of a layer, by the format."""


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
    add("--capability", metavar="X.Y", type=_capability, help=text)
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


def add_stage_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `stage_layers_from` reads."""
    group = parser.add_argument_group("pipeline")
    text = "pipeline-parallel size [that of the plan or problem]"
    group.add_argument("--pipeline-stages", metavar="P", type=integer, help=text)
    text = (
        "decoder layers of each model chunk, in forward order; m marks the chunk with multi-token "
        "prediction, as in 2,2,0m,0 [that of the plan or problem; m: the last chunk]"
    )
    group.add_argument("--chunk-layers", metavar="N,N,...", type=_chunks, help=text)


def stage_layers_from(
    args: argparse.Namespace, names: Sequence[str], known: StageLayers | None, num_stages: int
) -> StageLayers:
    """Return the layers of each pipeline stage: those of the flags, else those that are known.

    Args:
        args: The parsed flags.
        names: The linears.
        known: The layers of each stage of the job that the plan or problem is of, or None.
        num_stages: The number of stages of that job.

    Raises:
        UsageError: if the layers are not known, or do not add up.
    """
    chunks = args.chunk_layers
    wanted = args.pipeline_stages
    if known is not None:
        num_stages = known.num_stages
        if chunks is None and wanted in (None, num_stages):
            return known
    if wanted is None and chunks is not None and len(chunks) != num_stages:
        raise UsageError(
            f"--chunk-layers gives {len(chunks)} model chunks, and the number of pipeline stages "
            f"known is {num_stages}; give --pipeline-stages"
        )
    num_stages = wanted or max(num_stages, 1)
    layers: dict[str, tuple[str, int]] = {}
    for name in names:
        layer, block, _ = outer_layer(name)
        layers[layer] = (block, int(layer.rpartition(".")[2]))
    decoder = [number for block, number in layers.values() if block == "decoder"]
    num_decoder = 1 + max(decoder, default=-1)
    if chunks is None:
        if num_stages > 1:
            raise UsageError(
                f"which layers each of the {num_stages} pipeline stages holds is not known; give "
                f"the number of layers of each model chunk (together {num_decoder}): "
                "--chunk-layers N,N,..."
            )
        chunks = ((num_decoder, True),)
    return _counted_layers(layers, num_decoder, num_stages, chunks)


def _counted_layers(
    layers: Mapping[str, tuple[str, int]],
    num_decoder: int,
    num_stages: int,
    chunks: Sequence[tuple[int, bool]],
) -> StageLayers:
    """Return the layers of each stage, from the number of layers of each model chunk.

    Args:
        layers: (block, number) of each layer.
        num_decoder: number of decoder layers.
        num_stages: pipeline-parallel size.
        chunks: number of decoder layers of each chunk in forward order, and whether the layers of
            multi-token prediction are there; chunk 0 of every stage comes first.

    Raises:
        UsageError: if the layers do not add up, or where a layer is cannot be known.
    """
    if len(chunks) % num_stages:
        raise UsageError(
            f"{len(chunks)} model chunks for {num_stages} pipeline stages; give the same number of "
            "chunks for every stage"
        )
    given = sum(count for count, _ in chunks)
    if given != num_decoder:
        raise UsageError(
            f"--chunk-layers gives {given} layers in {len(chunks)} chunks; the model has "
            f"{num_decoder}"
        )
    with_mtp = [index for index, (_, has_mtp) in enumerate(chunks) if has_mtp]
    if len(with_mtp) > 1:
        raise UsageError("--chunk-layers: all layers of multi-token prediction are in one chunk")
    tables: list[dict[str, int]] = [{} for _ in chunks]
    ends = list(itertools.accumulate(count for count, _ in chunks))
    for layer, (block, number) in layers.items():
        if block == "decoder":
            index = bisect.bisect_right(ends, number)
            tables[index][layer] = number - (ends[index] - chunks[index][0])
        elif block == "mtp" or len(chunks) == 1:
            tables[with_mtp[0] if with_mtp else -1][layer] = number
        else:
            raise UsageError(
                f"'{layer}': --chunk-layers counts layers of the decoder; export the plan of a run "
                "with these pipeline stages, or give --pipeline-stages 1"
            )
    return StageLayers(tuple(tuple(tables[stage::num_stages]) for stage in range(num_stages)))


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


def _chunks(text: str) -> tuple[tuple[int, bool], ...]:
    """Return (number of decoder layers, whether multi-token prediction is there) of each chunk."""
    parts = text.split(",")
    return tuple((integer(part.removesuffix("m"), least=0), part.endswith("m")) for part in parts)


def _capability(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,3})\.(\d{1,3})", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"must be like 9.0 or 10.0, got '{text}'")
    return int(match[1]), int(match[2])


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


def _torchtitan_filters(linears: Mapping[str, Option]) -> tuple[dict[str, Any], list[str]]:
    """Return {converter: keyword arguments of its Config}, and a line for each replaced option.

    torchtitan and torchao convert a linear whose fully qualified name contains an entry of `fqns`
    (all converters but float8), or none of `filter_fqns` (float8). Converters without a linear are
    left out, because an empty `fqns` would convert every linear. Output layer and routers are never
    planned.
    """
    formats, changes = _renamed(linears, 0, "layers")
    converters = {name: _TORCHTITAN_CONVERTERS.get(fmt) for name, fmt in formats.items()}
    used = {converter for converter in converters.values() if converter is not None}
    lists = {}
    for converter in sorted(used - {"float8"}):
        names = [name for name, own in converters.items() if own == converter]
        lists[converter] = {"fqns": names}
    if "float8" in used:
        names = [name for name, own in converters.items() if own != "float8"]
        lists["float8"] = {"filter_fqns": [*names, "output", "lm_head", "router.gate"]}
    return lists, changes


def _modelopt_config(linears: Mapping[str, Option]) -> tuple[dict[str, Any], list[str]]:
    """Return the content of `hf_quant_config.json`, and a line for each replaced option.

    Serving runs the forward pass, so each linear gets its format of fprop.
    """
    forward = {name: Option.uniform(option.fprop) for name, option in linears.items()}
    formats, changes = _renamed(forward, 1, "model.layers")
    layers = {}
    for name, fmt in formats.items():
        if fmt in _MODELOPT_PARAMETERS:  # not BF16
            layers[name] = _MODELOPT_PARAMETERS[fmt]
    quantization = {
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": None,
        "quantized_layers": layers,
    }
    producer = {"name": "megatron-snip", "version": __version__}
    return {"producer": producer, "quantization": quantization}, changes


def _renamed(
    linears: Mapping[str, Option], column: int, prefix: str
) -> tuple[dict[str, str], list[str]]:
    """Return {new name: format, which may be bf16}, and a line for each replaced option.

    Args:
        linears: Option of each linear, by Megatron's name.
        column: The column of `_PARENTS` and `_LINEARS`: 0 is torchtitan's, 1 Hugging Face's.
        prefix: Path of the layers in the other program.
    """
    candidates = [Option.uniform(name) for name in _KNOWN_RECIPES]
    found: dict[str, str] = {}
    changes: dict[str, None] = {}
    for name, option in linears.items():
        block, layer, module = split_linear_name(name)
        parent, _, linear = module.rpartition(".")
        if block == "decoder" and parent in _PARENTS and linear in _LINEARS:
            what = str(option)
            instead = nearest_option(option, candidates)
            for other in _LINEARS[linear][column].split():
                new_name = f"{prefix}.{layer}.{_PARENTS[parent][column]}.{other}"
                found[new_name] = instead.fprop
        else:  # the other program has no name for this linear
            what = f"{option} of {block} {module}"
            instead = BF16
        if instead != option:
            changes[f"{what} becomes {instead}"] = None
    return found, list(changes)


_TRANSLATIONS = {"torchtitan": _torchtitan_filters, "modelopt": _modelopt_config}

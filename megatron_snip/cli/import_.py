"""`megatron-snip import`: a plan from Megatron's own precision file.

The file's globs are matched against the linears of a problem (one that a run wrote, e.g. with
`--snip-collect-only`), as Megatron matches them against its modules: the first match decides.
"""

import argparse
from collections import Counter
from pathlib import Path

from megatron_snip.cli.common import check_output, write_output
from megatron_snip.cli.export import add_stage_flags, stages_from
from megatron_snip.errors import UsageError
from megatron_snip.files import read_yaml
from megatron_snip.formats import lowest_precision
from megatron_snip.linears.te.precision_config import PrecisionFile, num_layers
from megatron_snip.options import BF16, Option
from megatron_snip.planning.plan import assigned_plan
from megatron_snip.planning.problem import read_problem

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
    stages = stages_from(args, num_layers(problem.names), known=problem.num_stages)
    if len(args.files) not in (1, stages.num_stages):
        raise UsageError(
            f"{len(args.files)} files for {stages.num_stages} pipeline stages; give one file, or "
            "one for each (--pipeline-stages changes their number)"
        )
    files = [PrecisionFile(read_yaml(path), f"'{path}'") for path in args.files]
    base = Option.parse(args.base)
    linears: dict[str, Option] = {}
    for name in problem.names:
        file = files[0 if len(files) == 1 else stages.local(name)[0]]
        linears[name] = file.option(name, stages, base, args.sequential_experts)
    formats: dict[str, None] = {}
    for option in linears.values():
        formats |= dict.fromkeys(option.formats)
    quantized = tuple(name for name in formats if name != "bf16")
    lowest = lowest_precision(quantized or ("fp8",))
    stage_and_flops = {each.name: (each.stage, each.flops) for each in problem.linears}
    plan = assigned_plan(linears, stage_and_flops, lowest.name, "imported")
    write_output(args.output, plan.to_json())
    for text, count in Counter(map(str, plan.linears.values())).most_common():
        print(f"  {text}: {count} linears")
    print(f"share of FLOPs in the lowest precision: {plan.efficiency:.4f}")
    if base == BF16 and any(file.follows_the_run() for file in files):
        print(
            "warning: the file leaves linears in the run's own precision, which is taken as bf16; "
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

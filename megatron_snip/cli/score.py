"""`megatron-snip score`: judge any recipe by what a run measured.

One run with `--snip-collect-only` is enough: the problem file of a refresh has what every option of
every linear costs. A recipe need not be SNIP's.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_snip.cli.common import check_output, new_table, write_output
from megatron_snip.cli.import_ import recipe_of
from megatron_snip.cli.pipeline_flags import add_stage_flags
from megatron_snip.errors import UsageError, did_you_mean, listing
from megatron_snip.files import read_yaml
from megatron_snip.formats import get_format
from megatron_snip.linears.te.precision_config import PrecisionFile
from megatron_snip.options import Option
from megatron_snip.output import console
from megatron_snip.planning.plan import read_plan
from megatron_snip.planning.planner import frontier
from megatron_snip.planning.policies import policy_names
from megatron_snip.planning.problem import PlanningProblem, parse_option, read_problem
from megatron_snip.planning.score import Choice, Score, Scorer, first_last, last_blocks
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.reporting.text import SOLVER_NOISE, column, label, percent, quality

RULES = ("last-blocks:SHARE", "first-last:N,M")

EXAMPLES = (
    "megatron-snip score runs/demo/problems/21.json last-blocks:0.15 first-last:2,4",
    "megatron-snip score problem.json plan.json nemotron.yaml norms:0.8 --base nvfp4",
    "megatron-snip score problem.json out.stage0.yaml,out.stage1.yaml --output recipes.svg",
)

_COUNT = re.compile("[0-9]{1,9}")

_CURVE = tuple(k / 20 for k in range(21))
"""Targets of SNIP's curve in the picture."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add = parser.add_argument
    add("problem", metavar="PROBLEM.json", type=Path, help="problems/<iteration>.json of a run")
    text = (
        "a plan (PLAN.json), a precision file of Megatron (FILE.yaml, or the files of all stages "
        "with commas), a policy with its target (POLICY:TARGET), or a rule: last-blocks:SHARE "
        "keeps the last SHARE of the layers in BF16, first-last:N,M the first N and last M. A rule "
        "gives other linears their lowest option"
    )
    add("things", metavar="THING", nargs="+", help=text)
    text = "option of the linears that a precision file does not name, such as nvfp4 [bf16]"
    add("--base", metavar="OPTION", help=text)
    text = "in precision files experts are modules of their own (no --moe-grouped-gemm)"
    add("--sequential-experts", action="store_true", help=text)
    add("--output", metavar="FILE.svg", type=Path, help="draw the recipes beside SNIP's curve")
    add("--json", action="store_true", help="print the scores as JSON, only")
    add_stage_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Print the scores; return 0.

    Raises:
        UsageError: for bad input.
    """
    if args.output is not None:
        things = [Path(part) for thing in args.things for part in thing.split(",")]
        check_output(args.output, (args.problem, *things))
    problem = read_problem(args.problem)
    scorer = Scorer(problem)
    _check_flags(args)
    scores = [scorer.score(thing, _linears(thing, scorer, args)) for thing in args.things]
    if args.output is not None:
        write_output(args.output, _picture(problem, scores))
    if args.json:
        print(json.dumps([score.to_dict() for score in scores], indent=1))
        return 0
    _print(scores)
    if args.output is not None:
        print(f"wrote {args.output}")
    return 0


def _check_flags(args: argparse.Namespace) -> None:
    """Refuse the flags of precision files where no thing is one."""
    if any(_is_precision_file(thing) for thing in args.things):
        return
    given = {
        "--base": args.base is not None,
        "--sequential-experts": args.sequential_experts,
        "--pipeline-stages": args.pipeline_stages is not None,
        "--chunk-layers": args.chunk_layers is not None,
    }
    if flags := [name for name, is_given in given.items() if is_given]:
        raise UsageError(
            f"{listing(flags)}: for precision files of Megatron (.yaml), and none is given; "
            "leave it out, or name the file"
        )


def _is_precision_file(thing: str) -> bool:
    return all(Path(part).suffix in (".yaml", ".yml") for part in thing.split(","))


def _linears(thing: str, scorer: Scorer, args: argparse.Namespace) -> dict[str, Option]:
    """Return the option that a recipe gives every linear of the problem.

    Raises:
        UsageError: if it is no recipe, or one of another model.
    """
    names = scorer.problem.names
    if _is_precision_file(thing):
        paths = [Path(part) for part in thing.split(",")]
        files = [PrecisionFile(read_yaml(path), f"'{path}'") for path in paths]
        linears, warnings = recipe_of(
            files, scorer.problem, args, Option.parse(args.base or "bf16")
        )
        for warning in warnings:
            print(f"warning: {warning}", file=sys.stderr)
        return linears
    if thing.endswith(".json"):
        plan = read_plan(Path(thing))
        plan.check_against(names)
        return dict(plan.linears)
    kind, colon, given = thing.partition(":")
    if kind == "last-blocks" and colon:
        share = _number(thing, given, "last-blocks:SHARE, as in last-blocks:0.15")
        return scorer.low_and_high(last_blocks(names, share))
    if kind == "first-last" and colon:
        counts = given.split(",")
        if len(counts) != 2 or not all(map(_COUNT.fullmatch, counts)):
            raise UsageError(f"'{thing}' is not first-last:N,M, as in first-last:2,4")
        return scorer.low_and_high(first_last(names, *map(int, counts)))
    if not colon:
        hint = did_you_mean(kind, [f"{name}:0.8" for name in policy_names()])
        raise UsageError(
            f"'{thing}' is no plan (.json), precision file (.yaml), policy with a target "
            f"(norms:0.8) or rule ({', '.join(RULES)}){hint}"
        )
    target = _number(thing, given, "POLICY:TARGET, as in norms:0.8")
    return scorer.policy(kind, target)


def _number(thing: str, text: str, form: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 1.0:
        raise UsageError(f"'{thing}' is not {form}, with a number from 0 to 1")
    return value


def _print(scores: Sequence[Score]) -> None:
    out = console()
    table = new_table(("recipe",), ("share", "quality loss", "SNIP", "best rule", "of all low"))
    losses = column([score.quality_loss for score in scores], SOLVER_NOISE)
    snips = column([score.snip for score in scores], SOLVER_NOISE)
    for score, loss, snip in zip(scores, losses, snips, strict=True):
        rule = (
            "-" if score.rule is None else f"{quality(score.rule.quality_loss)} {score.rule.policy}"
        )
        table.add_row(
            label(score.name), percent(score.share), loss, snip, rule, percent(score.between)
        )
    out.print(table)
    for score in scores:
        out.print(f"{score.name}", markup=False, style="bold")
        if score.unmeasured:
            count = len(score.unmeasured)
            out.print(
                f"  no quality loss: {count} options were not measured: "
                f"{listing(list(score.unmeasured), 3)}",
                markup=False,
            )
        out.print(f"  low, and cost most: {_named(score.costly)}", markup=False)
        out.print(f"  high for least: {_named(score.idle)}", markup=False)
    out.print(
        "share: of the FLOPs in the lowest precision. SNIP, best rule: quality loss of SNIP's plan "
        "and of the best policy without measurements, at the same share. of all low: 0% is every "
        "linear in its highest option, 100% every linear in its lowest."
    )


def _named(choices: Sequence[Choice]) -> str:
    texts = [f"{c.linear} {c.option} ({quality(c.quality_loss, 2)})" for c in choices]
    return ", ".join(texts) or "none"


def _picture(problem: PlanningProblem, scores: Sequence[Score]) -> str:
    from megatron_snip.reporting import figures

    plans = frontier(problem.model_copy(update={"pins": ()}), PlanSettings(), _CURVE)
    points = [
        (plan.efficiency, plan.objective)
        for plan in plans.values()
        if plan is not None and plan.objective is not None
    ]
    recipes = [(s.name, s.share, s.quality_loss) for s in scores if s.quality_loss is not None]
    options = {option for row in problem.linears for option in row.options}
    formats = {name for option in options for name in parse_option(option).formats}
    bits = min(get_format(name).bits for name in formats)
    lowest = ", ".join(sorted(name for name in formats if get_format(name).bits == bits))
    return figures.svg(figures.recipes_on_frontier(points, recipes, lowest)).decode()

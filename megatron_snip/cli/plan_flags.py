"""Flags that `plan` and `pareto` share: the rules of a plan, from the command line."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron_snip.config import explain
from megatron_snip.errors import UsageError
from megatron_snip.planning.calibration import read_calibration, with_seconds
from megatron_snip.planning.policies import get_policy, policy_names
from megatron_snip.planning.problem import PlanningProblem, check_options, read_problem
from megatron_snip.planning.settings import PlanSettings

FLAGS = {"time_limit_s": "--time-limit", "pins": "--pin"}
"""Flags that are not called like the field of `PlanSettings` that they set."""


def add_rule_flags(parser: argparse.ArgumentParser) -> None:
    """Add the problem and everything that constrains a plan for it."""
    parser.add_argument("problem", metavar="PROBLEM.json", type=Path, help="what to plan for")
    rules = parser.add_argument_group("rules")
    rules.add_argument(
        "--pipeline-balance",
        choices=("none", "stage", "bottleneck"),
        help="where the target must hold: overall (none), in every pipeline stage (stage), or "
        "overall after the slowest stage was made as fast as possible, whatever that costs in "
        "quality (bottleneck) [none]",
    )
    rules.add_argument(
        "--pin",
        metavar="GLOB=OPTION",
        action="append",
        help="linears that keep an option, e.g. 'decoder.layers.0.*=fp8'; may be repeated",
    )
    rules.add_argument(
        "--first-layers", metavar="N=OPTION", help="the first N layers of a block keep an option"
    )
    rules.add_argument(
        "--last-layers", metavar="N=OPTION", help="the last N layers of a block keep an option"
    )
    rules.add_argument(
        "--cost",
        choices=("flops", "time"),
        help="what efficiency counts: FLOPs in the lowest precision, or seconds saved [flops]",
    )
    rules.add_argument(
        "--calibration",
        metavar="TABLE.json",
        type=Path,
        help="seconds for --cost time, from 'megatron-snip calibrate'",
    )
    solver = parser.add_argument_group("solver")
    solver.add_argument("--policy", metavar="NAME", help=f"{', '.join(policy_names())} [snip]")
    solver.add_argument("--time-limit", metavar="S", help="seconds it may take [30]")
    solver.add_argument("--gap", metavar="F", help="relative gap that is good enough [0.001]")
    solver.add_argument("--workers", metavar="N", help="threads; 1 is deterministic [1]")
    solver.add_argument("--seed", metavar="N", help="seed of the solver and of 'random' [0]")


def problem_from(args: argparse.Namespace) -> PlanningProblem:
    """Read the problem, with the calibration table's seconds where one is given.

    Raises:
        UsageError: if a file is bad, or the table would not be used.
    """
    if args.calibration is not None and args.cost != "time":
        raise UsageError("--calibration holds seconds, which only --cost time counts; add that")
    problem = read_problem(args.problem)
    if args.calibration is None:
        return problem
    check_options(problem, f"problem file '{args.problem}'")  # a table knows no others
    return with_seconds(problem, read_calibration(args.calibration))


def settings_from(args: argparse.Namespace, **more: str | None) -> PlanSettings:
    """Return the settings that the flags ask for.

    Args:
        args: with the flags of `add_rule_flags`.
        more: further fields of `PlanSettings`, each from the flag of its name; None if not given.

    Raises:
        UsageError: one line that names the flag.
    """
    values = {**_rule_values(args), **{k: v for k, v in more.items() if v is not None}}
    try:
        settings = PlanSettings(**values)
    except ValidationError as error:
        field = str(error.errors()[0]["loc"][0])
        raise UsageError(f"{flag_of(field)}: {explain(error).partition(': ')[2]}") from None
    get_policy(settings.policy)  # an unknown one is told before any file is read
    return settings


def flag_of(field: str) -> str:
    """Return the flag that sets a field of `PlanSettings`."""
    return FLAGS.get(field, "--" + field.replace("_", "-"))


def _rule_values(args: argparse.Namespace) -> dict[str, Any]:
    values = {
        "pipeline_balance": args.pipeline_balance,
        "first_layers": _edge("--first-layers", args.first_layers),
        "last_layers": _edge("--last-layers", args.last_layers),
        "cost": args.cost,
        "policy": args.policy,
        "time_limit_s": args.time_limit,
        "gap": args.gap,
        "workers": args.workers,
        "seed": args.seed,
    }
    if args.pin:
        values["pins"] = tuple(_pair("--pin", text, "GLOB") for text in args.pin)
    return {name: value for name, value in values.items() if value is not None}


def _edge(flag: str, text: str | None) -> tuple[str, str] | None:
    if text is None:
        return None
    count, option = _pair(flag, text, "N")
    if not count.isdecimal():
        raise UsageError(f"{flag}: '{text}' is not N=OPTION, with N a number of layers")
    return count, option


def _pair(flag: str, text: str, left: str) -> tuple[str, str]:
    before, sign, option = text.rpartition("=")
    if not sign or not before or not option:
        raise UsageError(f"{flag}: '{text}' is not {left}=OPTION")
    return before, option

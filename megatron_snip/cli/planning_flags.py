"""Flags that `plan` and `pareto` share: problem, constraints, solver."""

from __future__ import annotations

import argparse
from pathlib import Path

from pydantic import ValidationError

from megatron_snip.config import explain
from megatron_snip.errors import UsageError
from megatron_snip.planning.calibration import read_calibration, with_seconds
from megatron_snip.planning.policies import get_policy, policy_names
from megatron_snip.planning.problem import PlanningProblem, check_options, read_problem
from megatron_snip.planning.settings import PlanSettings

INFEASIBLE = 3
"""Exit status where no plan satisfies the constraints."""

_FLAGS = {"time_limit_s": "--time-limit", "pins": "--pin"}
"""Flags that are not called like the field of `PlanSettings` that they set."""


def add_planning_flags(parser: argparse.ArgumentParser) -> None:
    """Add the problem and the flags."""
    parser.add_argument("problem", metavar="PROBLEM.json", type=Path, help="the problem file")
    group = parser.add_argument_group("constraints")
    group.add_argument(
        "--pipeline-balance",
        choices=("none", "stage", "bottleneck"),
        help="where the target holds. none: over the model. stage: in every pipeline stage. "
        "bottleneck: over the model, and the slowest stage becomes as fast as possible first "
        "[none]",
    )
    group.add_argument(
        "--pin",
        metavar="GLOB=OPTION",
        action="append",
        help="fix the option of these linears, e.g. 'decoder.layers.0.*=fp8'; may be repeated",
    )
    group.add_argument(
        "--first-layers", metavar="N=OPTION", help="fix the option of each block's first N layers"
    )
    group.add_argument(
        "--last-layers", metavar="N=OPTION", help="fix the option of each block's last N layers"
    )
    group.add_argument(
        "--cost",
        choices=("flops", "time"),
        help="what efficiency counts: FLOPs in the lowest precision, or seconds saved [flops]",
    )
    group.add_argument(
        "--calibration",
        metavar="TABLE.json",
        type=Path,
        help="seconds for --cost time, from 'megatron-snip calibrate'",
    )
    solver = parser.add_argument_group("solver")
    solver.add_argument("--policy", metavar="NAME", help=f"{', '.join(policy_names())} [snip]")
    solver.add_argument("--time-limit", metavar="S", help="most seconds that solving takes [30]")
    solver.add_argument("--gap", metavar="F", help="relative gap at which solving stops [0.001]")
    solver.add_argument("--workers", metavar="N", help="threads; 1 is deterministic [1]")
    solver.add_argument("--seed", metavar="N", help="seed of the solver and of 'random' [0]")


def problem_from(args: argparse.Namespace) -> PlanningProblem:
    """Read the problem, with the calibration's seconds if there is one.

    Raises:
        UsageError: if a file is bad, or the calibration would not be used.
    """
    if args.calibration is not None and args.cost != "time":
        raise UsageError("--calibration holds seconds, which only --cost time counts; add that")
    problem = read_problem(args.problem)
    if args.calibration is None:
        return problem
    check_options(problem, f"problem file '{args.problem}'")
    return with_seconds(problem, read_calibration(args.calibration))


def settings_from(args: argparse.Namespace, **more: str | None) -> PlanSettings:
    """Return the settings that the flags give.

    Args:
        args: with the flags of `add_planning_flags`.
        more: further fields of `PlanSettings` as text; None where a flag is not given.

    Raises:
        UsageError: one line that names the flag.
    """
    values = {
        "pipeline_balance": args.pipeline_balance,
        "first_layers": _layers("--first-layers", args.first_layers),
        "last_layers": _layers("--last-layers", args.last_layers),
        "cost": args.cost,
        "policy": args.policy,
        "time_limit_s": args.time_limit,
        "gap": args.gap,
        "workers": args.workers,
        "seed": args.seed,
        "pins": tuple(_pair("--pin", text, "GLOB") for text in args.pin) if args.pin else None,
        **more,
    }
    try:
        settings = PlanSettings(**{k: v for k, v in values.items() if v is not None})
    except ValidationError as error:
        field = str(error.errors()[0]["loc"][0])
        flag = _FLAGS.get(field, "--" + field.replace("_", "-"))
        raise UsageError(f"{flag}: {explain(error).partition(': ')[2]}") from None
    get_policy(settings.policy)  # an unknown name is an error before any file is read
    return settings


def _layers(flag: str, text: str | None) -> tuple[str, str] | None:
    if text is None:
        return None
    count, option = _pair(flag, text, "N")
    if not count.isdecimal():
        raise UsageError(f"{flag}: '{text}' is not N=OPTION, with N a number of layers")
    return count, option


def _pair(flag: str, text: str, left: str) -> tuple[str, str]:
    before, _, option = text.rpartition("=")
    if not before or not option:
        raise UsageError(f"{flag}: '{text}' is not {left}=OPTION")
    return before, option

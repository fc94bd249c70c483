"""The plans that are compared, all with the same share of FLOPs in the low format.

An item is one GEMM of one linear. The plans are those of the policies. All but `snip-linear` choose
from options per GEMM, so that their shares are equal to within one GEMM; those of `uniform-OPTION`,
which ignores the target, and of healing are not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_snip.config import SnipConfig
from megatron_snip.divergence.quality_loss import (
    divergence_table,
    planning_problem,
)
from megatron_snip.options import Granularity, Option, enumerate_options
from megatron_snip.planning.planner import healing_problem, make_plan
from megatron_snip.planning.policies import POLICIES
from megatron_snip.planning.problem import PlanningProblem
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.statistics.records import LinearStatistics, StatisticsTable
from megatron_snip.types import Gemm

RULES = tuple(name for name in POLICIES if name != "snip")
"""The policies that SNIP is compared with; `norms` and `min-*-err` measure, too."""

HEALING = ("heal-plan", "heal-forward", "heal-backward")
"""SNIP per GEMM with healing, in each --snip-heal-order."""

HEALING_PARTS = 50
"""Equal parts of a branch with healing; each has its own plan."""

Item = tuple[str, Gemm]
Plan = Mapping[str, Option]


@dataclass(frozen=True)
class Formats:
    """The two formats of a plan, and the smallest allowed share of FLOPs in `low`."""

    low: str
    high: str
    target: float


def items_of(linears: Sequence[LinearStatistics]) -> list[Item]:
    """Return all items, in model order."""
    return [(linear.name, gemm) for linear in linears for gemm in Gemm]


def plan_of(low: set[Item], linears: Sequence[LinearStatistics], formats: Formats) -> Plan:
    """Return the plan with these items in the low format and all others in the high one."""
    return {
        s.name: Option(*(formats.low if (s.name, g) in low else formats.high for g in Gemm))
        for s in linears
    }


def low_items(plan: Plan, formats: Formats) -> set[Item]:
    """Return the items of a plan that are in the low format."""
    return {(name, gemm) for name, option in plan.items() for gemm in Gemm
            if option[gemm] == formats.low}  # fmt: skip


def share_of(low: set[Item], linears: Sequence[LinearStatistics]) -> float:
    """Return the share of the linears' FLOPs in the low format."""
    flops = {s.name: s.flops_per_token / 3 for s in linears}
    return sum(flops[name] for name, _ in low) / (3 * sum(flops.values()))


REPLAN = "replan"


def make_plans(
    table: StatisticsTable, formats: Formats, seed: int, names: Sequence[str]
) -> dict[str, list[Plan]]:
    """Return the plans of each variant, from one measurement.

    A variant has one plan, or with healing one for each `HEALING_PARTS`-th of a branch.

    Args:
        table: statistics of the checkpoint that the runs start from.
        formats: what the plans choose from.
        seed: of the random policies.
        names: of policies, `snip-linear`, `snip-gemm`, `heal-ORDER`, or REPLAN, which is
            `snip-gemm` whose plan is made again after half of a branch.

    Raises:
        UsageError: if a name is unknown.
    """
    problems = {g: _problem(table, formats, g) for g in ("linear", "gemm")}
    plans: dict[str, list[Plan]] = {}
    for name in names:
        if name in HEALING:
            plans[name] = _healing_plans(problems["gemm"], formats, name.removeprefix("heal-"))
            continue
        is_snip = name in ("snip-linear", "snip-gemm", REPLAN)
        problem = problems["linear" if name == "snip-linear" else "gemm"]
        settings = PlanSettings(policy="snip" if is_snip else name, seed=0 if is_snip else seed)
        plans[name] = [make_plan(problem, settings).linears]
    return plans


def _healing_plans(problem: PlanningProblem, formats: Formats, order: str) -> list[Plan]:
    """SNIP's plan for 70 % of the parts; then the target falls to 0 in equal steps."""
    names = (formats.high, formats.low)
    config = SnipConfig(formats=names, granularity="gemm", heal_order=order)
    first = HEALING_PARTS * 7 // 10
    plan = make_plan(problem, PlanSettings(policy="snip"))
    plans: list[Plan] = [plan.linears] * first
    for left in reversed(range(HEALING_PARTS - first)):
        target = formats.target * left / (HEALING_PARTS - first)
        wanted = problem.model_copy(update={"target": target})
        if order != "plan":
            wanted = healing_problem(wanted, plan, config)
        plan = make_plan(wanted, PlanSettings(policy="snip"))
        plans.append(plan.linears)
    return plans


def snip_costs(table: StatisticsTable, formats: Formats) -> dict[Item, float]:
    """Return the quality loss of each item alone in the low format, all others in BF16."""
    single = {g: Option(*(formats.low if g == k else "bf16" for k in Gemm)) for g in Gemm}
    options = (*single.values(), Option.uniform(formats.low))
    rows = divergence_table(table, options, formats.low, SnipConfig()).linears
    return {
        (name, g): math.inf if (loss := row[single[g]].quality_loss) is None else loss
        for name, row in rows.items()
        for g in Gemm
    }


def _problem(table: StatisticsTable, formats: Formats, granularity: Granularity) -> PlanningProblem:
    options = enumerate_options((formats.high, formats.low), granularity)
    divergences = divergence_table(table, options, formats.low, SnipConfig())
    return planning_problem(divergences, formats.target)

"""The plans that are compared, all with the same share of FLOPs in the low format.

An item is one GEMM of one linear. A variant is a policy with its own granularity: `snip-gemm`,
`grads-first` and `random-gemm` choose for each GEMM, the others for each linear. `snip-paper`
chooses for each linear by the paper's quality loss: |first| + fisher, and lambda 1.
`norms-q-linear` and `norms-q-gemm` are SNIP with the quality loss of `--snip-measure norms`. Shares
are made equal: a target stands for the nearest share that linears can have (`equal_share`), and a
rule that would exceed it skips what does not fit and goes on with the next in its order
(`exact_fill`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_snip.config import SnipConfig
from megatron_snip.divergence.quality_loss import (
    divergence_table,
    planning_problem,
)
from megatron_snip.options import BF16, Granularity, Option, enumerate_options
from megatron_snip.planning.planner import make_plan
from megatron_snip.planning.policies import POLICIES, UNIFORM, get_policy
from megatron_snip.planning.problem import PlanningProblem
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.run.healing import healing_problem
from megatron_snip.statistics.records import LinearStatistics, StatisticsTable
from megatron_snip.types import Gemm

RULES = tuple(name for name in POLICIES if name != "snip")
"""The policies that SNIP is compared with; `norms` and `min-*-err` measure, too."""

HEALING = ("heal-plan", "heal-forward", "heal-backward", "heal-grads-first")
"""SNIP per GEMM with healing, in each --snip-heal-order; and the rule with the same targets."""

HEALING_PARTS = 50
"""Equal parts of a branch with healing; each has its own plan."""

Item = tuple[str, Gemm]
Plan = Mapping[str, Option]


@dataclass(frozen=True)
class Formats:
    """The two formats of a plan."""

    low: str
    high: str = "fp8"


def items_of(linears: Sequence[LinearStatistics]) -> list[Item]:
    """Return all items, in model order."""
    return [(linear.name, gemm) for linear in linears for gemm in Gemm]


def plan_of(low: set[Item], names: Iterable[str], formats: Formats) -> Plan:
    """Return the plan with these items in the low format and all others in the high one."""
    return {
        name: Option(*(formats.low if (name, g) in low else formats.high for g in Gemm))
        for name in names
    }


def low_items(plan: Plan, formats: Formats) -> set[Item]:
    """Return the items of a plan that are in the low format."""
    return {(name, gemm) for name, option in plan.items() for gemm in Gemm
            if option[gemm] == formats.low}  # fmt: skip


def share_of(low: set[Item], flops: Mapping[str, float]) -> float:
    """Return the share of FLOPs in the low format; `flops` are those of each linear."""
    return sum(flops[name] for name, _ in low) / (3 * sum(flops.values()))


REPLANNED = {"replan": "snip-gemm", "replan-norms-gemm": "norms-gemm"}
"""Variants whose plan is made again after half of a branch, and what makes their plans."""

SNIP_PROBLEMS = {
    "snip-linear": "linear",
    "snip-gemm": "gemm",
    "snip-paper": "paper",
    "norms-q-linear": "norms-q-linear",
    "norms-q-gemm": "norms-q-gemm",
}
"""Which of `problems_of` a variant of SNIP solves."""

PAPER = SnipConfig(loss_divergence="first_plus_fisher", weight_lambda=1.0)
NORMS = SnipConfig(measure="norms")


def exact_fill(sizes: Sequence[int], total: int) -> list[bool]:
    """Return which items are taken, in their order, so that their sizes add up to `total`.

    An item is skipped only if it does not fit, or if the later ones could not fill what it leaves.
    """
    reachable = [1]  # bit k: a sum of k; of no item, then of the last one, the last two, ...
    for size in reversed(sizes):
        reachable.append(reachable[-1] | reachable[-1] << size)
    taken = []
    left = total
    for index, size in enumerate(sizes):
        later = reachable[len(sizes) - 1 - index]
        takes = size <= left and bool(later >> (left - size) & 1)
        taken.append(takes)
        left -= size * takes
    assert left == 0, f"no items add up to {total}"
    return taken


class Planner:
    """Makes the plans of variants from one measurement.

    Args:
        problems: those of `problems_of` that the variants need.
        formats: what the plans choose from.
        seed: of the random policies.
    """

    def __init__(
        self, problems: Mapping[str, PlanningProblem], formats: Formats, seed: int
    ) -> None:
        self._problems = problems
        self._formats = formats
        self._seed = seed
        self._flops = {linear.name: linear.flops for linear in problems["linear"].linears}
        whole = [round(flops) for flops in self._flops.values()]
        self._units = sum(whole) // math.gcd(*whole)
        self._orders: dict[str, list[set[Item]]] = {}

    @property
    def bf16(self) -> Plan:
        """The plan with all linears in BF16."""
        return dict.fromkeys(self._flops, BF16)

    def equal_share(self, target: float) -> float:
        """Return the share nearest to `target` that complete linears can have.

        It is a multiple of the greatest common divisor of their FLOPs. GEMMs can have it, too.
        """
        return math.floor(target * self._units + 0.5) / self._units

    def share(self, plan: Plan) -> float:
        """Return the share of the linears' FLOPs that a plan has in the low format."""
        return share_of(low_items(plan, self._formats), self._flops)

    def plans(self, name: str, target: float) -> list[Plan]:
        """Return a variant's plan, or with healing one for each `HEALING_PARTS`-th of a branch.

        Args:
            name: a policy, one of SNIP_PROBLEMS or REPLANNED, `heal-ORDER`, or, with any target,
                `bf16` or `uniform-FORMAT`.
            target: share of FLOPs in the low format, made attainable by `equal_share`.

        Raises:
            UsageError: if the name is unknown.
        """
        if name == "bf16":
            return [self.bf16]
        if name.startswith(UNIFORM):
            return [dict.fromkeys(self._flops, Option.uniform(name.removeprefix(UNIFORM)))]
        share = self.equal_share(target)
        if name in HEALING:
            return self._healing(name.removeprefix("heal-"), share)
        return [self._plan(REPLANNED.get(name, name), share)]

    def _plan(self, name: str, share: float) -> Plan:
        if name in SNIP_PROBLEMS:
            problem = self._problems[SNIP_PROBLEMS[name]]
            return make_plan(problem, PlanSettings(target=share)).linears
        steps = self._order(name)
        sizes = [3 * self._units * share_of(step, self._flops) for step in steps]
        taken = exact_fill([round(size) for size in sizes], round(3 * self._units * share))
        low = set().union(*(step for step, is_taken in zip(steps, taken, strict=True) if is_taken))
        return plan_of(low, self._flops, self._formats)

    def _order(self, name: str) -> list[set[Item]]:
        """Return what a rule lowers, one GEMM or linear at a time: its plans from 0 to 1."""
        if name not in self._orders:
            granularity = "gemm" if get_policy(name).granularity == "gemm" else "linear"
            settings = PlanSettings(policy=name, seed=self._seed)
            steps: list[set[Item]] = []
            low: set[Item] = set()
            while len(low) < 3 * len(self._flops):
                share = share_of(low, self._flops) + 0.5 / (3 * self._units)
                wanted = settings.model_copy(update={"target": share})
                plan = make_plan(self._problems[granularity], wanted).linears
                found = low_items(plan, self._formats)
                assert low < found, f"{name} does not lower in one order"
                steps.append(found - low)
                low = found
            self._orders[name] = steps
        return self._orders[name]

    def _healing(self, order: str, share: float) -> list[Plan]:
        """A plan for 70 % of the parts; then the target falls to 0 in equal steps."""
        first = HEALING_PARTS * 7 // 10
        steps = HEALING_PARTS - first
        targets = [share * left / steps for left in reversed(range(steps))]
        if order in RULES:
            return [self._plan(order, target) for target in [share] * first + targets]
        names = (self._formats.high, self._formats.low)
        config = SnipConfig(formats=names, granularity="gemm", heal_order=order)
        problem = self._problems["gemm"].model_copy(update={"target": share})
        plan = make_plan(problem, PlanSettings())
        plans: list[Plan] = [plan.linears] * first
        for target in targets:
            wanted = problem.model_copy(update={"target": target})
            if order != "plan":
                wanted = healing_problem(wanted, plan, config)
            plan = make_plan(wanted, PlanSettings())
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


def problems_of(table: StatisticsTable, formats: Formats) -> dict[str, PlanningProblem]:
    """Return the problems of a measurement.

    Returns:
        `linear` and `gemm`: options per linear and per GEMM with this project's quality loss;
        `paper`: options per linear with that of PAPER; `norms-q-linear` and `norms-q-gemm`: options
        per linear and per GEMM with that of NORMS.
    """

    def problem(granularity: Granularity, config: SnipConfig) -> PlanningProblem:
        options = enumerate_options((formats.high, formats.low), granularity)
        return planning_problem(divergence_table(table, options, formats.low, config), 0.0)

    return {
        "linear": problem("linear", SnipConfig()),
        "gemm": problem("gemm", SnipConfig()),
        "paper": problem("linear", PAPER),
        "norms-q-linear": problem("linear", NORMS),
        "norms-q-gemm": problem("gemm", NORMS),
    }

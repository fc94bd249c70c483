"""The plans that are compared, all with the same share of FLOPs in the low format.

An item is one GEMM of one linear. A variant is a policy with its own granularity: `norms-q-gemm`,
`grads-first` and `random-gemm` choose for each GEMM, the others for each linear. `norms-q-linear`
and `norms-q-gemm` are SNIP. Shares are made equal: a target stands for the nearest share that
linears can have (`equal_share`), and a rule that would exceed it skips what does not fit and goes
on with the next in its order (`exact_fill`).

Rows of AT_TAG are made at the tag TAG: with plans of SNIP from measured products.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_snip.config import SnipConfig
from megatron_snip.divergence.quality_loss import divergence_table, planning_problem
from megatron_snip.options import BF16, Granularity, Option, enumerate_options
from megatron_snip.planning.planner import make_plan
from megatron_snip.planning.policies import UNIFORM, get_policy
from megatron_snip.planning.problem import PlanningProblem
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.statistics.records import StatisticsTable
from megatron_snip.types import Gemm

TAG = "products-last"
"""Of git: the last commit that measures products."""

AT_TAG = (
    "snip-linear",
    "snip-gemm",
    "snip-paper",
    "replan",
    "heal-plan",
    "heal-forward",
    "heal-backward",
    "heal-grads-first",
    "replan-norms-gemm",
)
"""Variants of the committed rows that are not made here. `snip-paper` has the paper's quality loss,
|first| + fisher with lambda 1. Plans of `replan` are made again after half of a branch; under
`heal` the target falls to 0 at its end."""

Item = tuple[str, Gemm]
Plan = Mapping[str, Option]


@dataclass(frozen=True)
class Formats:
    """The two formats of a plan."""

    low: str
    high: str = "fp8"


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


SNIP = {"norms-q-linear": "linear", "norms-q-gemm": "gemm"}
"""The variants of SNIP, and their granularity."""


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
        problems: of each variant of SNIP that is planned, and of each granularity that a rule has.
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

    def equal_share(self, target: float) -> float:
        """Return the share nearest to `target` that complete linears can have.

        It is a multiple of the greatest common divisor of their FLOPs. GEMMs can have it, too.
        """
        return math.floor(target * self._units + 0.5) / self._units

    def share(self, plan: Plan) -> float:
        """Return the share of the linears' FLOPs that a plan has in the low format."""
        return share_of(low_items(plan, self._formats), self._flops)

    def plan(self, name: str, target: float) -> Plan:
        """Return a variant's plan.

        Args:
            name: a policy, a variant of SNIP that has a problem, or, with any target, `bf16` or
                `uniform-FORMAT`.
            target: share of FLOPs in the low format, made attainable by `equal_share`.

        Raises:
            UsageError: if the name is unknown.
        """
        if name == "bf16":
            return dict.fromkeys(self._flops, BF16)
        if name.startswith(UNIFORM):
            return dict.fromkeys(self._flops, Option.uniform(name.removeprefix(UNIFORM)))
        share = self.equal_share(target)
        if name in self._problems:
            return make_plan(self._problems[name], PlanSettings(target=share)).linears
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


def problems_of(table: StatisticsTable, formats: Formats) -> dict[str, PlanningProblem]:
    """Return the problems of a measurement for all variants of SNIP and all rules."""

    def problem(granularity: Granularity) -> PlanningProblem:
        options = enumerate_options((formats.high, formats.low), granularity)
        table_of_options = divergence_table(table, options, formats.low, SnipConfig())
        return planning_problem(table_of_options, 0.0)

    found = {"linear": problem("linear"), "gemm": problem("gemm")}
    return found | {name: found[granularity] for name, granularity in SNIP.items()}

"""The plans that are compared, all with the same share of FLOPs in the low format.

An item is one GEMM of one linear. A rule is an order of the items: they take the low format in turn
until the target is reached, so that all rules have equal shares to within one GEMM. Rules by linear
lower the three GEMMs of a linear one after the other.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron_snip.config import SnipConfig
from megatron_snip.divergence.divergence import absolute_error, relative_error
from megatron_snip.divergence.quality_loss import (
    QualitySettings,
    divergence_table,
    planning_problem,
)
from megatron_snip.options import Option
from megatron_snip.planning.planner import make_plan
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.statistics.records import LinearStatistics, StatisticsTable
from megatron_snip.types import Gemm, split_linear_name

Item = tuple[str, Gemm]
Plan = Mapping[str, Option]
Rule = Callable[[Sequence[LinearStatistics], str, random.Random], list[Item]]


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


def filled(order: Sequence[Item], linears: Sequence[LinearStatistics], target: float) -> set[Item]:
    """Return the first items of an order that reach the target."""
    low: set[Item] = set()
    for item in order:
        if share_of(low, linears) >= target - 1e-9:
            break
        low.add(item)
    return low


def make_plans(
    table: StatisticsTable, formats: Formats, seed: int, names: Sequence[str]
) -> dict[str, Plan]:
    """Return the plan of each variant, from one measurement.

    Args:
        table: statistics of the checkpoint that the runs start from.
        formats: what the plans choose from.
        seed: of the random rules.
        names: of `RULES`, `snip-linear`, `snip-gemm`, or `uniform-FORMAT`.

    Raises:
        KeyError: if a name is unknown.
    """
    plans: dict[str, Plan] = {}
    for name in names:
        if name in ("snip-linear", "snip-gemm"):
            plans[name] = _snip(table, formats, name.removeprefix("snip-"))
        elif name.startswith("uniform-"):
            option = Option.parse(name.removeprefix("uniform-"))
            plans[name] = dict.fromkeys((s.name for s in table.linears), option)
        else:
            order = RULES[name](table.linears, formats.low, random.Random(seed))
            low = filled(order, table.linears, formats.target)
            plans[name] = plan_of(low, table.linears, formats)
    return plans


def snip_costs(table: StatisticsTable, formats: Formats) -> dict[Item, float]:
    """Return the quality loss of each item alone in the low format, all others in BF16."""
    single = {g: Option(*(formats.low if g == k else "bf16" for k in Gemm)) for g in Gemm}
    settings = _quality((*single.values(), Option.uniform(formats.low)), formats)
    rows = divergence_table(table, settings).linears
    return {
        (row.name, g): math.inf if (loss := row.options[single[g]].quality_loss) is None else loss
        for row in rows
        for g in Gemm
    }


def _quality(options: tuple[Option, ...], formats: Formats) -> QualitySettings:
    snip = SnipConfig(formats=(formats.high, formats.low))
    return QualitySettings(options, formats.low, snip.loss_divergence, snip.weight_lambda)


def _snip(table: StatisticsTable, formats: Formats, granularity: str) -> Plan:
    pair = (formats.high, formats.low)
    if granularity == "linear":
        options = tuple(map(Option.uniform, pair))
    else:
        options = tuple(Option(a, b, c) for a in pair for b in pair for c in pair)
    divergences = divergence_table(table, _quality(options, formats))
    problem = planning_problem(divergences, formats.low, formats.target)
    return make_plan(problem, PlanSettings()).linears


def _by_linear(key: Callable[[LinearStatistics, str], float]) -> Rule:
    def order(linears: Sequence[LinearStatistics], low: str, _: random.Random) -> list[Item]:
        ranked = sorted(linears, key=lambda s: key(s, low) / s.flops_per_token)
        return items_of(ranked)

    return order


def _by_gemm(key: Callable[[LinearStatistics, str, Gemm], float]) -> Rule:
    def order(linears: Sequence[LinearStatistics], low: str, _: random.Random) -> list[Item]:
        by_name = {s.name: s for s in linears}
        cost = lambda item: key(by_name[item[0]], low, item[1])  # noqa: E731
        return sorted(
            items_of(linears), key=lambda item: cost(item) / by_name[item[0]].flops_per_token
        )

    return order


def frobenius(s: LinearStatistics, low: str, gemm: Gemm) -> float:
    """Return the paper's bound of a GEMM's error, |A| |eB| + |eA| |B|, times the third norm."""
    f = s.formats[low]
    x, w, g = (v**0.5 for v in (s.input_square, s.weight_square, s.grad_square))
    ex, ew, eg = (
        v**0.5 for v in (f.input_error_square, f.weight_error_square, f.grad_error_square)
    )
    bound = {
        Gemm.FPROP: g * (x * ew + ex * w),
        Gemm.DGRAD: x * (g * ew + eg * w),
        Gemm.WGRAD: w * (g * ex + eg * x),
    }
    return bound[gemm]


def _layer(name: str) -> int:
    return split_linear_name(name)[1]


def _middle_distance(name: str, layers: int) -> float:
    return abs(_layer(name) - (layers - 1) / 2)


def _layers(linears: Sequence[LinearStatistics]) -> int:
    return 1 + max(_layer(s.name) for s in linears)


def _layer_id(linears: Sequence[LinearStatistics], _: str, __: random.Random) -> list[Item]:
    """The middle layers first."""
    count = _layers(linears)
    return items_of(sorted(linears, key=lambda s: _middle_distance(s.name, count)))


def _last_blocks(linears: Sequence[LinearStatistics], _: str, __: random.Random) -> list[Item]:
    """All layers but the last ones, which stay in the high format."""
    return items_of(sorted(linears, key=lambda s: _layer(s.name)))


def _grads_first(linears: Sequence[LinearStatistics], _: str, __: random.Random) -> list[Item]:
    """All dgrad and wgrad GEMMs, then fprop from the middle layers outwards."""
    count = _layers(linears)
    grads = [item for item in items_of(linears) if item[1] != Gemm.FPROP]
    fprop = sorted(linears, key=lambda s: _middle_distance(s.name, count))
    return grads + [(s.name, Gemm.FPROP) for s in fprop]


def _layer_type(linears: Sequence[LinearStatistics], _: str, __: random.Random) -> list[Item]:
    kinds = ("linear_fc1", "linear_proj", "linear_qkv", "linear_fc2")
    return items_of(sorted(linears, key=lambda s: kinds.index(s.name.rsplit(".", 1)[1])))


def _random(linears: Sequence[LinearStatistics], _: str, draw: random.Random) -> list[Item]:
    return items_of(draw.sample(list(linears), len(linears)))


def _random_gemm(linears: Sequence[LinearStatistics], _: str, draw: random.Random) -> list[Item]:
    items = items_of(linears)
    return draw.sample(items, len(items))


RULES: dict[str, Rule] = {
    "random": _random,
    "random-gemm": _random_gemm,
    "last-blocks": _last_blocks,
    "layer-id": _layer_id,
    "layer-type": _layer_type,
    "grads-first": _grads_first,
    "norms": _by_linear(lambda s, low: sum(frobenius(s, low, g) for g in Gemm)),
    "norms-gemm": _by_gemm(frobenius),
    "min-abs-err": _by_linear(lambda s, low: absolute_error(s, Option.uniform(low))),
    "min-rel-err": _by_linear(lambda s, low: relative_error(s, Option.uniform(low))),
}
"""Orders of the items by name."""

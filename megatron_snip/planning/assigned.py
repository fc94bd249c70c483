"""Plans that no policy made: an assignment from elsewhere, with its efficiency counted.

    efficiency = sum_l flops[l] * share of l's FLOPs in the lowest precision / sum_l flops[l]

as `planning/cost.py` defines it, overall and for every pipeline stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from megatron_snip.options import Option
from megatron_snip.planning.cost import as_fraction, ratio
from megatron_snip.planning.plan import PrecisionPlan, assignment_digest


@dataclass(frozen=True)
class Work:
    """One linear's work.

    Attributes:
        name: of the linear.
        stage: pipeline stage.
        flops: of its three GEMMs; only ratios matter.
    """

    name: str
    stage: int
    flops: float


def assigned_plan(
    linears: Mapping[str, Option],
    work: Sequence[Work],
    lowest_format: str,
    policy: str,
    step: int = 0,
) -> PrecisionPlan:
    """Return the plan that holds an assignment.

    Args:
        linears: option of each linear.
        work: of the same linears.
        lowest_format: what efficiency counts.
        policy: who made the assignment.
        step: training step that it stems from.
    """
    assert set(linears) == {each.name for each in work}
    num_stages = 1 + max(each.stage for each in work)
    by_stage = [[each for each in work if each.stage == s] for s in range(num_stages)]
    return PrecisionPlan(
        step=step,
        policy=policy,
        status="fixed",
        objective=None,
        bound=None,
        seconds=0.0,
        target=0.0,
        efficiency=_efficiency(work, linears, lowest_format),
        stages=tuple(_efficiency(part, linears, lowest_format) for part in by_stage),
        linears=dict(linears),
        digest=assignment_digest(linears),
    )


def _efficiency(work: Iterable[Work], linears: Mapping[str, Option], lowest: str) -> float:
    gained = total = Fraction(0)
    for each in work:
        flops = as_fraction(each.flops)
        total += flops
        gained += flops * as_fraction(linears[each.name].share_in(lowest))
    return ratio(gained, total)

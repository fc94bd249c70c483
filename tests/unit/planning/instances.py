"""Random planning problems: ordinary, tied, and with scales that would upset a careless solver."""

from __future__ import annotations

import random
from dataclasses import dataclass

from megatron_snip.options import Option
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.planning.problem import LinearChoices, OptionCost, PlanningProblem
from megatron_snip.planning.settings import PlanSettings
from tests.unit.planning.build import name_of, plan_of

OPTIONS = ("bf16", "fp8", "fp4-fp8-fp8", "fp4-fp4-fp8", "fp8-fp8-fp4", "fp4")
BALANCES = ("none", "stage")


@dataclass(frozen=True)
class Instance:
    """A problem, the settings, and the previous plan."""

    problem: PlanningProblem
    settings: PlanSettings
    previous: PrecisionPlan | None


def random_instance(seed: int, num_linears: int | None = None) -> Instance:
    """Return an instance; the same seed gives the same one.

    Args:
        seed: of the generator.
        num_linears: by default few enough for enumeration. With a number, HiGHS can judge the
            instance: efficiencies come in steps above its feasibility tolerance of 1e-6.
    """
    r = random.Random(seed)
    count = num_linears if num_linears is not None else r.randint(1, 7)
    stages = r.randint(1, min(4, count))
    names = r.sample(OPTIONS, r.randint(2, 4)) if num_linears is None else list(OPTIONS[1:])
    small = num_linears is None
    loss_of, flops_of = r.choice(LOSSES if small else LOSSES[:6]), r.choice(FLOPS)
    saving_of = r.choice(SAVINGS)
    with_seconds, is_mixed = small and r.random() < 0.3, small and r.random() < 0.3
    if not small:
        flops_of, saving_of = r.choice(FLOPS[:2]), SAVINGS[0]
    linears = []
    for i in range(count):
        flops = flops_of(r)
        options = {}
        for name in names:
            share = Option.parse(name).share_in("fp4")
            forbidden = r.random() < 0.05
            options[name] = OptionCost(
                quality_loss=None if forbidden else loss_of(r, share),
                saving=saving_of(r, share),
                seconds=r.choice([r.randint(0, 9), flops * r.random()]) if with_seconds else None,
            )
        stage = r.randrange(stages) if is_mixed else i * stages // count
        linears.append(LinearChoices(name=name_of(i), stage=stage, flops=flops, options=options))
    target = r.choice([0.0, 1.0, 1 / 3, 0.5, 0.75, r.random(), r.random()])
    problem = PlanningProblem(linears=tuple(linears), target=target)
    previous = None
    if r.random() < 0.4:  # rarely with an option that the problem does not list
        rows = [[*x.options, *(["fp8"] if r.random() < 0.1 else [])] for x in linears]
        previous = plan_of({x.name: r.choice(row) for x, row in zip(linears, rows, strict=True)})
    pinned = [r.choice(linears) for _ in range(r.choice([0, 0, 0, 1, 2]))]
    settings = PlanSettings(
        pipeline_balance=r.choice(BALANCES),
        pins=tuple((linear.name, r.choice(list(linear.options))) for linear in pinned),
        change_penalty=r.choice([0.0, abs(loss_of(r, 0.2)), 0.25, 1e3]),
        cost="time" if with_seconds and r.random() < 0.5 else "flops",
    )
    return Instance(problem, settings, previous)


LOSSES = (
    lambda r, share: r.random() * (0.1 + share),
    lambda r, share: 10.0 ** r.uniform(-6, 6) * (0.01 + share),
    lambda r, share: float(r.randint(0, 2)),
    lambda r, share: 0.0,
    lambda r, share: r.uniform(-1.0, 1.0),
    lambda r, share: 10.0 ** r.randint(-6, 6),
    lambda r, share: 1e-30 * (r.random() + share),
)
FLOPS = (
    lambda r: float(r.randint(1, 9)),
    lambda r: 6.0 * 4096 * 128 * r.randint(1, 64),
    lambda r: r.random() + 1e-3,
    lambda r: 10.0 ** r.uniform(0, 7),
    lambda r: float(r.choice([0, 0, 1, 2])),
    lambda r: 1.0,
)
SAVINGS = (
    lambda r, share: share,
    lambda r, share: share,
    lambda r, share: r.random(),
    lambda r, share: r.choice([0.0, 0.1, 0.37, 1.0]),
)

import itertools

import numpy as np
import pytest

from megatron_snip.planning.reach import best_efficiency, bottleneck_floors, most_gain
from megatron_snip.planning.rules import Rules
from megatron_snip.planning.table import Table
from tests.unit.planning.build import rules_of
from tests.unit.planning.instances import random_instance


def rules(seed: int, balance: str) -> Rules:
    instance = random_instance(seed)
    previous = None
    if instance.previous is not None:
        previous = [str(instance.previous.linears[name]) for name in instance.problem.names]
    return rules_of(
        instance.problem,
        previous,
        pipeline_balance=balance,
        max_changes=instance.settings.max_changes,
        pins=instance.settings.pins,
    )


def assignments(table: Table) -> list[np.ndarray]:
    return [np.array(x) for x in itertools.product(*(range(len(row)) for row in table.options))]


SEEDS = [seed for seed in range(120) if len(random_instance(seed).problem.linears) <= 4]


@pytest.mark.parametrize("balance", ["none", "stage"])
def test_feasibility_is_decided_exactly(balance: str) -> None:
    feasible = 0
    for seed in SEEDS:
        task = rules(seed, balance).task()
        found = most_gain(task)
        exists = any(task.holds(columns) for columns in assignments(task.table))
        assert (found is not None) == exists, seed
        if found is not None:
            assert task.holds(found), seed
            feasible += 1
    assert 10 < feasible < len(SEEDS)


@pytest.mark.parametrize("balance", ["none", "stage"])
def test_the_best_target_is_the_best_of_all_assignments(balance: str) -> None:
    for seed in SEEDS:
        given = rules(seed, balance)
        task = given.task([label for label in given.labels if not label.startswith("target")])
        table = task.table
        reached = [
            min(table.stage_efficiencies(c)) if balance == "stage" else table.efficiency(c)
            for c in assignments(table)
            if task.holds(c)
        ]
        best = best_efficiency(given.task(), every_stage=balance == "stage")
        assert (best is None) == (not reached), seed
        if best is not None:
            assert best == pytest.approx(max(reached), abs=1e-12), seed


def test_the_bottleneck_s_floors_allow_the_fastest_slowest_stage_and_no_slower_one() -> None:
    checked = 0
    for seed in SEEDS:
        task = rules(seed, "bottleneck").task()
        table = task.table
        slowest = {}
        for columns in assignments(table):
            if task.holds(columns):
                gains = table.stage_gains(columns)
                times = [b - table.rate * g for b, g in zip(table.stage_bases, gains, strict=True)]
                slowest[tuple(columns.tolist())] = max(times)
        floors = bottleneck_floors(task)
        assert (floors is None) == (not slowest), seed
        if floors is None:
            continue
        checked += 1
        least = float(min(slowest.values()))
        for columns, time in slowest.items():
            gains = table.stage_gains(np.array(columns))
            kept = all(g >= f for g, f in zip(gains, floors, strict=True))
            assert kept == (float(time) <= least * (1 + 1e-11)), seed
    assert checked > 10

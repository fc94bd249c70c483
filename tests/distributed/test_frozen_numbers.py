"""Losses, gradient norms, scores and plans of a few small runs are those of tests/frozen."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.distributed.frozen_runs import RUNS, STEPS, differences, read, running

Run = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with running() as function:
        yield function


@pytest.mark.parametrize("name", RUNS)
def test_numbers_are_those_of_the_repository(run: Run, name: str) -> None:
    lines = differences(run(name), read(name))
    assert not lines, "\n".join(["docs/proof.md has the rule", *lines])


def test_frozen_runs_train_and_plan() -> None:
    """Else a change that plans differently, or not at all, would pass."""
    wanted = {name: read(name) for name in RUNS}
    for name, run in wanted.items():
        assert len(run["quality_loss"]) == len(run["plans"]) == 3, name
        assert len(run["loss"]) == len(run["grad_norm"]) == STEPS, name
    change = [name for name, run in wanted.items() if len({d for _, d in run["plans"]}) > 1]
    assert len(change) >= 5


def test_a_changed_number_is_seen() -> None:
    wanted = read("tp1")
    for key in ("loss", "grad_norm"):
        changed = {**wanted, key: [*wanted[key][:-1], wanted[key][-1] * (1 + 1e-15)]}
        assert len(differences(changed, wanted)) == 1
        elsewhere = {**changed, "machine": "another"}
        assert not differences(elsewhere, wanted)
    other = {**wanted, "machine": "another"}
    assert differences({**other, "loss": [x * 1.006 for x in wanted["loss"]]}, wanted)
    assert differences({**other, "plans": wanted["plans"][:-1]}, wanted)
    first, *rest = wanted["plans"]
    assert differences({**other, "plans": [[first[0], "0"], *rest]}, wanted)

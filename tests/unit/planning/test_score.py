"""Scores of recipes against brute force, and the rules that people use."""

import itertools
from typing import Any

import numpy as np
import pytest

from megatron_snip.errors import UsageError
from megatron_snip.options import Option
from megatron_snip.planning.policies import POLICIES, Policy, Request, Solution
from megatron_snip.planning.problem import PlanningProblem
from megatron_snip.planning.score import Scorer, first_last, last_blocks
from tests.unit.planning.build import name_of, problem_of

OPTIONS = ("fp8", "fp4")


def random_problem(seed: int, num_linears: int = 8) -> PlanningProblem:
    random = np.random.default_rng(seed)
    losses = [[float(v) for v in sorted(random.lognormal(0, 1, 2))] for _ in range(num_linears)]
    flops = [float(v) for v in random.integers(1, 5, num_linears)]
    return problem_of(losses, options=OPTIONS, flops=flops)


def recipe(problem: PlanningProblem, choice: Any) -> dict[str, Option]:
    return {n: Option.uniform(OPTIONS[c]) for n, c in zip(problem.names, choice, strict=True)}


@pytest.mark.parametrize("seed", range(5))
def test_a_recipe_is_scored_as_brute_force_does(seed: int) -> None:
    problem = random_problem(seed)
    rows = problem.linears
    total = sum(row.flops for row in rows)

    def brute(choice: Any) -> tuple[float, float]:
        pairs = list(zip(rows, choice, strict=True))
        loss = sum(row.options[OPTIONS[c]].quality_loss or 0.0 for row, c in pairs)
        return sum(row.flops * c for row, c in pairs) / total, loss

    scorer = Scorer(problem)
    every = {choice: brute(choice) for choice in itertools.product((0, 1), repeat=len(rows))}
    low, high = every[(1,) * len(rows)][1], every[(0,) * len(rows)][1]
    random = np.random.default_rng(seed)
    for _ in range(4):
        choice = tuple(int(c) for c in random.integers(0, 2, len(rows)))
        share, loss = every[choice]
        score = scorer.score("mine", recipe(problem, choice))
        assert score.share == pytest.approx(share, rel=1e-12)
        assert score.quality_loss == pytest.approx(loss, rel=1e-12)
        best = min(each for found, each in every.values() if found >= share - 1e-12)
        assert score.snip == pytest.approx(best, rel=1e-9)
        assert score.rule is not None and score.rule.quality_loss >= best - 1e-9
        assert score.between == pytest.approx((loss - high) / (low - high), rel=1e-9)
        extra = [
            (row.options["fp4"].quality_loss or 0.0) - (row.options["fp8"].quality_loss or 0.0)
            for row in rows
        ]
        costly = sorted((i for i, c in enumerate(choice) if c), key=lambda i: -extra[i])[:3]
        assert [each.linear for each in score.costly] == [name_of(i) for i in costly]
        idle = sorted(
            (i for i, c in enumerate(choice) if not c), key=lambda i: extra[i] / rows[i].flops
        )[:3]
        assert [each.linear for each in score.idle] == [name_of(i) for i in idle]


def test_a_plugin_s_policy_that_fails_ends_no_score(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    problem = random_problem(0)
    choice = (0, 1) * 4
    without = Scorer(problem).score("mine", recipe(problem, choice))

    def decide(request: Request) -> Solution:
        raise KeyError("mine")

    monkeypatch.setitem(POLICIES, "mine", Policy("mine", decide))
    assert Scorer(problem).score("mine", recipe(problem, choice)) == without
    assert "policy 'mine' is no rule to compare with: KeyError: 'mine'" in caplog.text
    assert "Traceback" in caplog.text


def test_bf16_costs_nothing_and_what_was_not_measured_is_named() -> None:
    problem = problem_of([[0.0, 1.0], [0.0, None], [0.5, 1.0]])
    scorer = Scorer(problem)
    bf16 = scorer.score("bf16", dict.fromkeys(problem.names, Option.uniform("bf16")))
    assert (bf16.share, bf16.quality_loss) == (0.0, 0.0)
    low = scorer.score("low", dict.fromkeys(problem.names, Option.uniform("fp4")))
    assert low.quality_loss is None and low.between is None
    assert low.unmeasured == (f"{name_of(1)}: fp4",)
    other = scorer.score("mxfp4", dict.fromkeys(problem.names, Option.uniform("mxfp4")))
    assert len(other.unmeasured) == 3
    with pytest.raises(UsageError, match="no option for 1 linears"):
        scorer.score("part", {name: Option.uniform("fp4") for name in problem.names[1:]})


@pytest.mark.parametrize(
    ("share", "kept"), [(0.0, []), (0.1, [9]), (0.15, [8, 9]), (0.2, [8, 9]), (1.0, range(10))]
)
def test_the_last_blocks_stay_high(share: float, kept: Any) -> None:
    names = [name_of(i) for i in range(10)]
    is_high = last_blocks(names, share)
    assert [i for i, name in enumerate(names) if is_high(name)] == list(kept)
    assert is_high("mtp.layers.0.mtp_model_layer.mlp.linear_fc1")


def test_the_first_and_last_layers_stay_high() -> None:
    names = [name_of(i) for i in range(6)]
    is_high = first_last(names, 1, 2)
    assert [i for i, name in enumerate(names) if is_high(name)] == [0, 4, 5]
    none = first_last(names, 0, 0)
    assert not any(map(none, names))
    linears = Scorer(problem_of([[0.0, 1.0]] * 6)).low_and_high(is_high)
    assert [str(option) for option in linears.values()] == ["bf16", *["fp4"] * 3, "bf16", "bf16"]

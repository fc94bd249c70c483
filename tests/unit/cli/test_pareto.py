"""`megatron-snip pareto`: the frontier as table and JSON, and bad input."""

import json
from typing import Any

import pytest

from tests.unit.planning.build import problem_of

PROBLEM = problem_of([[0.0, 1.0], [0.0, 2.0], [0.0, 3.0], [3.79e-14, None]], target=0.5)


def test_ranges_include_both_ends_and_are_exact(problem: str, printed: Any) -> None:
    for text, targets in (
        ("0:1:0.05", [k / 20 for k in range(21)]),
        ("0.1:0.5:0.3", [0.1, 0.4]),
        ("0.75, 0.5", [0.5, 0.75]),
        ("0:0,200:0.75", [0.0, 0.75]),
    ):
        points = json.loads(printed("pareto", problem, "--targets", text, "--json"))
        assert [point["target"] for point in points] == targets


def test_the_frontier_as_table_and_json(problem: str, printed: Any) -> None:
    words = ["pareto", problem, "--targets", "0:1:0.25"]
    text = printed(*words)
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}
    assert rows["0.00"][:5] == ["0.0000", "0.000", "0.000", "0", "4"]  # not 3.79e-14
    assert rows["0.75"][:5] == ["0.7500", "6.000", "0.000", "3", "1"]
    assert "quality loss: the plan's predicted harm" in text
    assert rows["1.00"][0] == "infeasible" and max(map(len, text.splitlines())) <= 100
    values = json.loads(printed(*words, "--json"))
    assert [value["status"] for value in values] == ["optimal"] * 4 + ["infeasible"]
    assert [v["objective"] for v in values] == pytest.approx([0.0, 1.0, 3.0, 6.0, None])
    assert values[1]["options"] == {"fp4": 1, "fp8": 3}


def test_unreachable_targets_exit_with_3(problem: str, printed: Any) -> None:
    text = printed("pareto", problem, "--targets", "0.9,1", status=3)
    assert text.count("infeasible") == 2

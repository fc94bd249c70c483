"""The files of plans and problems: what they hold, and what is refused."""

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_snip.errors import UsageError
from megatron_snip.planning.plan import PrecisionPlan, read_plan, write_plan
from megatron_snip.planning.problem import PlanningProblem, read_problem, write_problem
from tests.unit.planning.build import name_of, plan_of

KEYS = (
    "version iteration policy status objective bound seconds target efficiency stages linears "
    "digest"
)

PLAN = plan_of(["fp8", "fp4-fp8-bf16"], iteration=20, objective=2.0, bound=1.5, stages=(0.25, 0.5))


def test_the_file_holds_exactly_the_documented_keys_and_comes_back(tmp_path: Path) -> None:
    write_plan(PLAN, tmp_path / "plan.json")
    stored = json.loads((tmp_path / "plan.json").read_text())
    assert " ".join(stored) == KEYS
    assert stored["linears"][name_of(1)] == {"fprop": "fp4", "dgrad": "fp8", "wgrad": "bf16"}
    assert read_plan(tmp_path / "plan.json") == PLAN


def test_the_digest_is_the_documented_one_and_ignores_order_and_metadata() -> None:
    linears = PLAN.to_dict()["linears"]
    text = json.dumps(linears, sort_keys=True, separators=(",", ":"))
    assert PLAN.digest == hashlib.sha256(text.encode()).hexdigest()
    turned = {name_of(1): "fp4-fp8-bf16", name_of(0): "fp8"}
    assert plan_of(turned, iteration=99).digest == PLAN.digest
    assert plan_of(["fp8", "fp4"]).digest != PLAN.digest


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"digest": "0" * 64}, "digest"),
        ({"version": 3}, "version 3"),
        ({"status": "OPTIMAL"}, "status"),
        ({"linears": {name_of(0): {"fprop": "fp8"}}}, name_of(0)),
        ({"linears": {name_of(0): {"fprop": "fp5", "dgrad": "fp8", "wgrad": "fp8"}}}, "fp5"),
        ({"linears": {name_of(0): dict.fromkeys(("fprop", "dgrad", "wgrad", "x"), "fp8")}}, "x"),
    ],
)
def test_a_damaged_plan_is_refused_in_one_line(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError, match=r"\Aplan file 'x'[^\n]*\Z") as caught:
        PrecisionPlan.from_dict(PLAN.to_dict() | changes, "plan file 'x'")
    assert word in str(caught.value)


def test_version_1_counted_iterations_from_0() -> None:
    old = {k: v for k, v in PLAN.to_dict().items() if k != "iteration"}
    assert PrecisionPlan.from_dict(old | {"version": 1, "step": 19}) == PLAN
    for damage in ({}, {"step": -1}, {"step": 1.5}, {"step": True}, {"step": 1, "iteration": 2}):
        with pytest.raises(UsageError, match="iteration"):
            PrecisionPlan.from_dict(old | {"version": 1} | damage)


def test_a_plan_of_another_model_is_refused_with_all_differences() -> None:
    PLAN.check_against([name_of(0), name_of(1)])
    with pytest.raises(UsageError) as caught:
        PLAN.check_against([name_of(1), *(f"x{i}" for i in range(20))])
    assert name_of(0) in str(caught.value) and "x0, x1" in str(caught.value)
    assert "and 12 more" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("objective", "bound", "gap"),
    [
        (2.0, 1.5, 0.25),
        (-2.0, -3.0, 0.5),
        (0.0, 0.0, 0.0),
        (0.0, -1.0, float("inf")),
        (None, 1.0, None),
        (1.0, None, None),
    ],
)
def test_gap(objective: float | None, bound: float | None, gap: float | None) -> None:
    assert plan_of(["fp8"], objective=objective, bound=bound).gap == gap


GOOD: dict[str, Any] = {
    "version": 1,
    "linears": [
        {
            "name": "decoder.layers.0.mlp.linear_fc1",
            "stage": 0,
            "flops": 10,
            "options": {
                "fp8": {"quality_loss": 0.0, "saving": 0},
                "fp4": {
                    "quality_loss": None,
                    "saving": 1,
                    "seconds": 0.5,
                    "scores": {"abs_error": 2.0, "rel_error": None},
                },
            },
        },
        {
            "name": "anything",
            "stage": 2,
            "flops": 1e30,
            "options": {"nvfp4": {"quality_loss": -1, "saving": 0.5}},
        },
    ],
    "target": 0.75,
}


def test_a_file_comes_back_as_it_was(tmp_path: Path) -> None:
    problem = PlanningProblem.from_dict(GOOD)
    write_problem(problem, tmp_path / "p.json")
    assert read_problem(tmp_path / "p.json") == problem
    assert json.loads((tmp_path / "p.json").read_text()) == problem.to_dict()
    assert problem.names == ("decoder.layers.0.mlp.linear_fc1", "anything")
    assert problem.num_stages == 3
    assert problem.linears[0].options["fp4"].quality_loss is None


def change(path: list[Any], value: Any) -> dict[str, Any]:
    """GOOD with one place set to a value."""
    changed = place = copy.deepcopy(GOOD)
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return changed


OPTION = {"quality_loss": 1.0, "saving": 0.5}
FC1 = "decoder.layers.0.mlp.linear_fc1"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (change(["version"], 2), ["version 2", "reads version 1"]),
        (change(["extra"], 1), ["unknown key 'extra'"]),
        (change(["linears", 0, "layer"], 1), ["unknown key", "layer", FC1]),
        (change(["target"], 1.5), ["target", "1.5"]),
        (change(["linears"], []), ["linears", "at least 1 item"]),
        (change(["linears", 1, "name"], FC1), [FC1, "twice"]),
        (change(["linears", 0, "name"], "a\x1b[2Jb"), ["'a\\x1b[2Jb'", "not printable"]),
        (change(["linears", 0, "options", "a\nb"], OPTION), ["unknown format", FC1]),
        (change(["linears", 0, "options", "fp4-fp4-fp4"], OPTION), ["two spellings", FC1]),
        (change(["linears", 0, "stage"], -1), ["stage", "-1", FC1]),
        (change(["linears", 0, "flops"], -1), ["flops", "-1", FC1]),
        (change(["linears", 0, "options"], {}), ["options", FC1]),
        (change(["linears", 0, "options", "fp4"], {"saving": 1}), ["quality_loss"]),
        (change(["linears", 0, "options", "fp4", "quality_loss"], float("nan")), ["finite"]),
        (change(["linears", 0, "options", "fp4", "scores", "x"], "1"), ["scores.x"]),
        ([GOOD], ["JSON object", "list"]),
    ],
)
def test_a_bad_problem_is_refused_in_one_line_that_names_the_place(
    value: Any, words: list[str]
) -> None:
    with pytest.raises(UsageError, match=r"\Aproblem file 'p.json'[^\n]*\Z") as caught:
        PlanningProblem.from_dict(value, "problem file 'p.json'")
    assert all(word in str(caught.value) for word in words)

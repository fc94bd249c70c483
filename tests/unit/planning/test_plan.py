import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_snip.errors import UsageError
from megatron_snip.planning.plan import PrecisionPlan, read_plan, write_plan
from tests.unit.planning.build import name_of, plan_of

KEYS = (
    "version iteration policy status objective bound seconds target efficiency stages linears "
    "digest"
)

NUMBERS = {"objective": 2.0, "bound": 1.5, "stages": (0.25, 0.5)}


def plan() -> PrecisionPlan:
    return plan_of(["fp8", "fp4-fp8-bf16"], iteration=20, **NUMBERS)


def test_the_file_holds_exactly_the_documented_keys_and_comes_back(tmp_path: Path) -> None:
    write_plan(plan(), tmp_path / "plan.json")
    stored = json.loads((tmp_path / "plan.json").read_text())
    assert " ".join(stored) == KEYS
    assert stored["linears"][name_of(1)] == {"fprop": "fp4", "dgrad": "fp8", "wgrad": "bf16"}
    assert read_plan(tmp_path / "plan.json") == plan()


def test_the_digest_is_the_documented_one_and_ignores_order_and_metadata() -> None:
    linears = plan().to_dict()["linears"]
    text = json.dumps(linears, sort_keys=True, separators=(",", ":"))
    assert plan().digest == hashlib.sha256(text.encode()).hexdigest()
    turned = {name_of(1): "fp4-fp8-bf16", name_of(0): "fp8"}
    assert plan_of(turned, iteration=99).digest == plan().digest
    assert plan_of(["fp8", "fp4"]).digest != plan().digest


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
        PrecisionPlan.from_dict(plan().to_dict() | changes, "plan file 'x'")
    assert word in str(caught.value)


def test_version_1_counted_iterations_from_0() -> None:
    old = {k: v for k, v in plan().to_dict().items() if k != "iteration"}
    assert PrecisionPlan.from_dict(old | {"version": 1, "step": 19}) == plan()
    for damage in ({}, {"step": -1}, {"step": 1.5}, {"step": True}, {"step": 1, "iteration": 2}):
        with pytest.raises(UsageError, match="iteration"):
            PrecisionPlan.from_dict(old | {"version": 1} | damage)


def test_a_plan_of_another_model_is_refused_with_all_differences() -> None:
    plan().check_against([name_of(0), name_of(1)])
    with pytest.raises(UsageError) as caught:
        plan().check_against([name_of(1), *(f"x{i}" for i in range(20))])
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

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_snip.errors import UsageError
from megatron_snip.options import BF16, Option
from megatron_snip.planning.plan import (
    PrecisionPlan,
    assignment_digest,
    changed_linears,
    read_plan,
    relative_gap,
    write_plan,
)
from tests.unit.planning.build import name_of, plan_of

KEYS = [
    "version",
    "step",
    "policy",
    "status",
    "objective",
    "bound",
    "seconds",
    "target",
    "efficiency",
    "stages",
    "linears",
    "digest",
]


def plan() -> PrecisionPlan:
    return plan_of(["fp8", "fp4-fp8-bf16"], step=20, objective=2.0, bound=1.5, stages=(0.25, 0.5))


def test_the_file_holds_exactly_the_documented_keys_and_comes_back(tmp_path: Path) -> None:
    write_plan(plan(), tmp_path / "plan.json")
    stored = json.loads((tmp_path / "plan.json").read_text())
    assert list(stored) == KEYS
    assert stored["linears"][name_of(1)] == {"fprop": "fp4", "dgrad": "fp8", "wgrad": "bf16"}
    assert read_plan(tmp_path / "plan.json") == plan()


def test_the_digest_is_the_documented_one_and_ignores_order_and_metadata() -> None:
    linears = plan().to_dict()["linears"]
    text = json.dumps(linears, sort_keys=True, separators=(",", ":"))
    assert plan().digest == hashlib.sha256(text.encode()).hexdigest()
    turned = dict(reversed(plan().linears.items()))
    assert assignment_digest(turned) == plan().digest
    assert plan_of(["fp8", "fp4-fp8-bf16"], step=99).digest == plan().digest
    assert plan_of(["fp8", "fp4"]).digest != plan().digest


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"digest": "0" * 64}, "digest"),
        ({"version": 3}, "version 3"),
        ({"more": 1}, "unknown key 'more'"),
        ({"status": "OPTIMAL"}, "status"),
        ({"step": -1}, "step"),
        ({"objective": "low"}, "objective"),
        ({"linears": {name_of(0): {"fprop": "fp8"}}}, name_of(0)),
        ({"linears": {name_of(0): {"fprop": "fp5", "dgrad": "fp8", "wgrad": "fp8"}}}, "fp5"),
        ({"linears": ["fp8"]}, "linears"),
        ({"stages": [None]}, "stages"),
    ],
)
def test_a_damaged_plan_is_refused_in_one_line(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError) as caught:
        PrecisionPlan.from_dict(plan().to_dict() | changes, "plan file 'x'")
    assert word in str(caught.value)
    assert str(caught.value).startswith("plan file 'x'")
    assert "\n" not in str(caught.value)


def test_an_edited_assignment_fails_its_digest() -> None:
    stored = plan().to_dict()
    stored["linears"][name_of(0)]["wgrad"] = "fp4"
    with pytest.raises(UsageError, match="edited or damaged"):
        PrecisionPlan.from_dict(stored)


def test_options_are_found_by_name() -> None:
    assert plan().option_of(name_of(1)) == Option("fp4", "fp8", "bf16")
    with pytest.raises(UsageError, match="no linear 'x'"):
        plan().option_of("x")


def test_check_against_lists_every_misfit_in_one_line() -> None:
    plan().check_against([name_of(0), name_of(1)])
    plan().check_against(
        [name_of(0), name_of(1)], [Option.parse("fp8"), Option.parse("fp4-fp8-bf16")]
    )
    mixed = Option.parse("fp4-fp8-bf16")
    with pytest.raises(UsageError) as caught:
        plan().check_against([name_of(1), "new.a", "new.b"], [mixed, BF16])
    message = str(caught.value)
    for word in (name_of(0), "new.a, new.b", "not on offer: fp8", "bf16"):
        assert word in message
    assert "\n" not in message


def test_long_lists_are_cut() -> None:
    with pytest.raises(UsageError, match="and 12 more"):
        plan().check_against([name_of(0), name_of(1), *(f"x{i}" for i in range(20))])


def test_changed_linears_compares_options() -> None:
    old, new = plan_of(["fp8", "fp8", "fp4"]), plan_of(["fp8", "fp4", "fp4"])
    assert changed_linears(old, new) == (name_of(1),)
    assert changed_linears(old, old) == ()
    assert changed_linears(None, new) == tuple(new.linears)


@pytest.mark.parametrize(
    ("objective", "bound", "gap"),
    [
        (2.0, 1.5, 0.25),
        (2.0, 2.0, 0.0),
        (2.0, 2.5, 0.0),
        (-2.0, -3.0, 0.5),
        (0.0, 0.0, 0.0),
        (0.0, -1.0, float("inf")),
        (None, 1.0, None),
        (1.0, None, None),
    ],
)
def test_gap(objective: float | None, bound: float | None, gap: float | None) -> None:
    assert relative_gap(objective, bound) == gap
    assert plan_of(["fp8"], objective=objective, bound=bound).gap == gap

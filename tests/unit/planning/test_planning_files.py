"""Files of plans, problems and measured seconds: what they hold, and what is refused."""

import copy
import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_snip.errors import UsageError
from megatron_snip.files import read_record
from megatron_snip.options import Option
from megatron_snip.planning.calibration import CalibrationTable, with_seconds
from megatron_snip.planning.plan import PrecisionPlan, read_plan, write_plan
from megatron_snip.planning.planner import make_plan
from megatron_snip.planning.problem import PlanningProblem, read_problem, write_problem
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.planning.stage_layers import StageLayers
from megatron_snip.types import Gemm
from tests.unit.planning.build import name_of, plan_of, problem_of

STAGE_LAYERS = [[{"decoder.layers.1": 0}], [{"decoder.layers.0": 3}], [{}]]
PLAN = plan_of(
    ["fp8", "fp4-fp8-bf16"],
    iteration=20,
    objective=2.0,
    bound=1.5,
    stages=(0.25, 0.5),
    stage_layers=StageLayers(STAGE_LAYERS),
)


def test_the_file_holds_exactly_the_documented_keys_and_comes_back(tmp_path: Path) -> None:
    write_plan(PLAN, tmp_path / "plan.json")
    stored = json.loads((tmp_path / "plan.json").read_text())
    first = "version iteration policy status objective bound seconds target efficiency stages"
    assert [*stored] == [*first.split(), "stage_layers", "linears", "digest"]
    assert stored["version"] == 3 and stored["stage_layers"] == STAGE_LAYERS
    assert stored["linears"][name_of(1)] == {"fprop": "fp4", "dgrad": "fp8", "wgrad": "bf16"}
    assert read_plan(tmp_path / "plan.json") == PLAN


def test_files_of_the_versions_before_are_read_and_lack_the_layers_of_stages() -> None:
    plan = PLAN.to_dict()
    del plan["stage_layers"]
    unknown = PLAN.model_copy(update={"stage_layers": None})
    assert PrecisionPlan.from_dict({**plan, "version": 2}) == unknown
    problem = PlanningProblem.from_dict({**GOOD, "version": 1})
    assert problem == PlanningProblem.from_dict(GOOD)
    assert problem.to_dict()["version"] == 2


def test_a_plan_has_the_layers_of_stages_that_its_problem_has() -> None:
    problem = problem_of([[0.0, 1.0]] * 2, stages=[1, 0])
    facts = {"stage_layers": StageLayers(STAGE_LAYERS)}
    problem = PlanningProblem.from_dict(problem.model_copy(update=facts).to_dict())
    assert json.loads("".join(problem.json_lines())) == problem.to_dict()
    plan = make_plan(problem, PlanSettings())
    assert plan.stage_layers == problem.stage_layers == facts["stage_layers"]


def test_the_digest_is_the_documented_one_and_ignores_order_and_metadata() -> None:
    linears = PLAN.to_dict()["linears"]
    text = json.dumps(linears, sort_keys=True, separators=(",", ":"))
    assert PLAN.digest == hashlib.sha256(text.encode()).hexdigest()
    turned = {name_of(1): "fp4-fp8-bf16", name_of(0): "fp8"}
    assert plan_of(turned, iteration=99).digest == PLAN.digest
    assert plan_of(["fp8", "fp4"]).digest != PLAN.digest


def test_a_plan_of_another_model_is_refused_with_all_differences() -> None:
    PLAN.check_against([name_of(0), name_of(1)])
    with pytest.raises(UsageError) as caught:
        PLAN.check_against([name_of(1), *(f"x{i}" for i in range(20))])
    assert name_of(0) in str(caught.value) and "x0, x1" in str(caught.value)
    assert "and 12 more" in str(caught.value) and "\n" not in str(caught.value)


def test_gap() -> None:
    cases = [(2.0, 1.5, 0.25), (-2.0, -3.0, 0.5), (0.0, 0.0, 0.0), (0.0, -1.0, float("inf"))]
    for objective, bound, gap in [*cases, (None, 1.0, None), (1.0, None, None)]:
        assert plan_of(["fp8"], objective=objective, bound=bound).gap == gap


GOOD: dict[str, Any] = {
    "version": 2,
    "linears": [
        {
            "name": name_of(0),
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
    "pins": [["decoder.layers.*", "fp8"]],
}


def test_a_file_comes_back_as_it_was(tmp_path: Path) -> None:
    problem = PlanningProblem.from_dict(GOOD)
    write_problem(problem, tmp_path / "p.json")
    assert read_problem(tmp_path / "p.json") == problem
    assert json.loads((tmp_path / "p.json").read_text()) == problem.to_dict()
    assert problem.names == (name_of(0), "anything")
    assert problem.num_stages == 3
    assert problem.linears[0].options["fp4"].quality_loss is None


def test_a_problem_has_one_stage_for_each_linear() -> None:
    problem = problem_of([[0.0, 1.0]] * 2, stages=[1, 1]).to_dict()
    with pytest.raises(UsageError, match=r"layers\.1.* is on stage 1; stage_layers .* on stage 0"):
        PlanningProblem.from_dict({**problem, "stage_layers": STAGE_LAYERS})


def measured(names: str, size: tuple[int, int], **seconds: tuple[float, ...]) -> dict[str, Any]:
    by_format = {f: dict(zip(map(str, Gemm), times, strict=True)) for f, times in seconds.items()}
    rows, columns = size
    return {"names": names, "out_features": rows, "in_features": columns, "seconds": by_format}


FIRST = measured("*.layers.0.*", (10, 5), fp8=(3.0, 2.0, 1.0), fp4=(1.0, 0.5, 0.25))
SECOND = measured("*.layers.*", (1, 1), fp8=(0.2, 0.2, 0.2), fp4=(0.2, 0.2, 0.1))
TABLE: dict[str, Any] = {
    "version": 1,
    "machine": "a machine",
    "device": "cpu",
    "date": "2026-01-01T00:00:00+00:00",
    "versions": {"torch": "2"},
    "tokens": 2,
    "linears": [FIRST, SECOND],
}
TIMED = problem_of([[0.0, 1.0], [0.0, 0.5]], 0.5, flops=[1200.0, 12.0])


def test_seconds_come_from_the_first_match_and_scale_with_flops() -> None:
    table = read_record(CalibrationTable, TABLE, "table")
    first, second = with_seconds(TIMED, table).linears
    # 6 * 2 * 10 * 5 = 600 FLOPs were measured, the linear has twice as many.
    assert [cost.seconds for cost in first.options.values()] == [12.0, 3.5]
    assert [cost.seconds for cost in second.options.values()] == pytest.approx([0.6, 0.5])
    assert table.seconds(first.name, first.flops, Option.parse("fp4-fp8-fp8")) == 8.0
    short = read_record(CalibrationTable, TABLE | {"linears": [FIRST]}, "table")
    with pytest.raises(UsageError, match=r"no seconds for 'fp8' of 'decoder\.layers\.1"):
        with_seconds(TIMED, short)
    with pytest.raises(UsageError, match="no seconds for 'bf16'"):
        short.seconds(first.name, 1.0, Option.parse("bf16"))


OPTION = {"quality_loss": 1.0, "saving": 0.5}
HUGE = {"fprop": 1e308, "dgrad": 1e308, "wgrad": 1e308}
"""Seconds whose sum overflows."""
READERS: dict[str, tuple[dict[str, Any], Any]] = {
    "plan": (PLAN.to_dict(), PrecisionPlan.from_dict),
    "problem": (GOOD, PlanningProblem.from_dict),
    "table": (TABLE, partial(read_record, CalibrationTable)),
}


@pytest.mark.parametrize(
    ("kind", "path", "value", "words"),
    [
        ("plan", ["digest"], "0" * 64, ["digest"]),
        ("plan", ["version"], 4, ["version 4", "reads version 2 or 3"]),
        ("plan", ["stage_layers"], [], ["stage_layers"]),
        (
            "plan",
            ["stage_layers", 0, 0],
            {},
            [name_of(1), "no pipeline stage holds decoder.layers.1"],
        ),
        ("plan", ["stage_layers", 2, 0], {"decoder.layers.1": 1}, ["'decoder.layers.1' is listed"]),
        ("plan", ["stage_layers", 2, 0], {name_of(3): 1}, [f"'{name_of(3)}' is no layer"]),
        ("plan", ["stage_layers", 2, 0], {"x": 1}, ["'x' has no layer"]),
        ("plan", ["stage_layers", 0, 0, "decoder.layers.4"], 0, ["both 'decoder.layers.0' in one"]),
        ("plan", ["stage_layers", 0, 0, "decoder.layers.4"], -1, ["stage_layers", "-1"]),
        ("problem", ["stage_layers"], [[{"decoder.layers.1": 0}]], ["no pipeline stage holds"]),
        ("plan", ["status"], "OPTIMAL", ["status"]),
        ("plan", ["linears", name_of(0)], {"fprop": "fp8"}, [name_of(0)]),
        ("plan", ["linears", name_of(0), "fprop"], "fp5", ["fp5"]),
        ("plan", ["linears", name_of(0), "x"], "fp8", ["x"]),
        ("problem", ["version"], 3, ["version 3", "reads version 1 or 2"]),
        ("problem", ["extra"], 1, ["unknown key 'extra'"]),
        ("problem", ["linears", 0, "layer"], 1, ["unknown key", "layer", name_of(0)]),
        ("problem", ["target"], 1.5, ["target", "1.5"]),
        ("problem", ["linears"], [], ["linears", "at least 1 item"]),
        ("problem", ["linears", 1, "name"], name_of(0), [name_of(0), "twice"]),
        ("problem", ["linears", 0, "name"], "a\x1b[2Jb", ["'a\\x1b[2Jb'", "not printable"]),
        ("problem", ["linears", 0, "options", "a\nb"], OPTION, ["unknown format", name_of(0)]),
        ("problem", ["linears", 0, "options", "fp4-fp4-fp4"], OPTION, ["two spellings"]),
        ("problem", ["linears", 0, "stage"], -1, ["stage", "-1", name_of(0)]),
        ("problem", ["linears", 0, "flops"], -1, ["flops", "-1", name_of(0)]),
        ("problem", ["linears", 0, "options"], {}, ["options", name_of(0)]),
        ("problem", ["linears", 0, "options", "fp4"], {"saving": 1}, ["quality_loss"]),
        ("problem", ["linears", 0, "options", "fp4", "quality_loss"], float("nan"), ["finite"]),
        ("problem", ["linears", 0, "options", "fp4", "scores", "x"], "1", ["scores.x"]),
        ("problem", [], [GOOD], ["JSON object", "list"]),
        ("table", ["version"], 2, ["version 1"]),
        ("table", ["tokens"], 0, ["tokens"]),
        ("table", ["linears", 0, "seconds", "fp9"], {}, ["fp9"]),
        ("table", ["linears", 0, "seconds", "fp8"], {"fprop": 1.0}, ["dgrad"]),
        ("table", ["linears", 0, "seconds", "fp8"], HUGE, ["fprop"]),
        ("table", ["linears", 0, "mixed_s"], 1e308, ["mixed_s"]),
    ],
)
def test_a_bad_file_is_refused_in_one_line_that_names_the_place(
    kind: str, path: list[Any], value: Any, words: list[str]
) -> None:
    good, read = READERS[kind]
    place = document = copy.deepcopy({"": good})
    *parents, last = ["", *path]
    for key in parents:
        place = place[key]
    place[last] = value
    with pytest.raises(UsageError, match=r"^file 'x'[^\n]*\Z") as caught:
        read(document[""], "file 'x'")
    assert all(word in str(caught.value) for word in words)

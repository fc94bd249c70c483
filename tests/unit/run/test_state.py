"""What a checkpoint keeps: plain types, there and back."""

import io
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_snip.config import SnipConfig
from megatron_snip.divergence.quality_loss import divergence_table, planning_problem
from megatron_snip.errors import UsageError
from megatron_snip.files import packed
from megatron_snip.log import forget_warnings
from megatron_snip.options import Option
from megatron_snip.run.guard import GuardState
from megatron_snip.run.state import (
    RunState,
    changed_plan_settings,
    reported_settings,
    resumed_state,
)
from megatron_snip.statistics.records import (
    BASE_COLUMNS,
    FORMAT_COLUMNS,
    FormatStatistics,
    LinearStatistics,
    StatisticsTable,
)
from tests.unit.planning.build import plan_of
from tests.unit.run.build import PENDING, PLAN, STATE

SOLVE = STATE.to_dict()["solve"]


@pytest.mark.parametrize("state", [STATE, RunState(0, PLAN, guard=GuardState())])
def test_there_and_back(state: RunState) -> None:
    value = state.to_dict()
    assert RunState.from_dict(json.loads(json.dumps(value))) == state
    # Megatron reads checkpoints without unpickling objects.
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    assert RunState.from_dict(torch.load(file, weights_only=True)) == state


def test_a_number_that_is_not_one_is_null_in_a_checkpoint() -> None:
    """Megatron compares what ranks save, and a NaN differs from itself."""
    errors = FormatStatistics(input_error_square=math.nan)
    linear = LinearStatistics("decoder.layers.0.mlp.linear_fc1", 0, 2, 2, 24.0)
    linear = replace(linear, grad_square=math.nan, formats={"fp4": errors})
    table = StatisticsTable(6, 1.5, (linear,))
    state = replace(STATE, observations=table)
    assert state.to_dict() == state.to_dict()
    value = json.loads(json.dumps(state.to_dict(), allow_nan=False))
    loaded = RunState.from_dict(value).observations
    assert loaded is not None and repr(loaded) == repr(table)
    assert math.isnan(loaded.linears[0].grad_square)


def test_a_state_of_600_linears_is_below_a_megabyte() -> None:
    """While a plan is pending, with as many different numbers as a run has."""
    rng = np.random.default_rng(0)
    names = [f"decoder.layers.{layer}.mlp.linear_fc{k}" for layer in range(300) for k in (1, 2)]
    table = StatisticsTable(6, 1.5, tuple(_measured(name, rng) for name in names))
    options = tuple(map(Option.uniform, ("bf16", "fp8", "fp4")))
    found = divergence_table(table, options, "fp4", SnipConfig(), warn=False)
    pending = replace(PENDING, problem=planning_problem(found, 0.5))
    file = io.BytesIO()
    torch.save(replace(STATE, observations=table, solve=pending).to_dict(), file)
    assert file.tell() < 1e6


def _measured(name: str, rng: np.random.Generator) -> LinearStatistics:
    def drawn(names: Sequence[str]) -> dict[str, Any]:
        return dict(zip(names, rng.random(len(names)) + 1.0, strict=True))

    formats = {low: FormatStatistics(**drawn(FORMAT_COLUMNS)) for low in ("fp8", "fp4")}
    values = {**drawn(BASE_COLUMNS), "formats": formats}
    return LinearStatistics(name, 0, 4096, 4096, 2.0**25, **values)


def test_earlier_checkpoints_call_the_fallback_good() -> None:
    value = STATE.to_dict()
    value["guard"]["good"] = value["guard"].pop("first_fallback")
    assert value["guard"]["good"] is not None
    assert RunState.from_dict(value) == STATE


@pytest.mark.parametrize(
    "guard",
    [
        {"loss": {"recent": [2.0], "watch": None}, "good": None, "refused": [], "falls": 1},
        {"loss": {"recent": [float("nan")]}},
        {"loss": {"recent": [1e308, -1e308]}},  # their difference overflows
        {"good": {}},
    ],
)
def test_a_guard_that_cannot_be_read_starts_anew(guard: Any, caplog: Any) -> None:
    forget_warnings()
    state = RunState.from_dict(STATE.to_dict() | {"guard": guard}, "here")
    assert state == replace(STATE, guard=None)
    assert [r.message[:32] for r in caplog.records] == ["snip: here: the guard starts anew"[:32]]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"version": 1}, "version 1; this megatron-snip reads version 3 or 4; .*--finetune"),
        ({"plan": {}}, "here is damaged: plan: version None"),
        ({"history": [1]}, "here is damaged: history"),
        ({"solve": {"iteration": 1}}, "here is damaged: solve.*; load another checkpoint"),
        ({"iteration": "seven"}, "here is damaged"),
        ({"iteration": -1}, "here is damaged: iteration must be from 0 on, got -1"),
        ({"schedule": {"refreshed": 10**9}}, "schedule.refreshed 1000000000 is not among the 7"),
        ({"history": [[9, "0"]]}, "history 9 is not among the 7"),
        ({"solve": {**SOLVE, "iteration": 10**9}}, "solve.iteration 1000000000 is not among"),
        ({"solve": {**SOLVE, "apply_at": 6}}, "solve.apply_at 6 is not after solve.iteration 6"),
        ({"observations": "?"}, "here is damaged: not JSON in zlib in base64"),
        (
            {"observations": packed({})[:12]},
            "here is damaged: not JSON in zlib.*: it is cut",
        ),
        ({"observations": packed([1])}, "here is damaged: statistics must hold a JSON object"),
    ],
)
def test_damage_is_named(change: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        RunState.from_dict(STATE.to_dict() | change, "here")
    with pytest.raises(UsageError, match="version None"):
        RunState.from_dict([1], "here")


def test_a_plan_that_a_resume_brought_may_begin_with_the_coming_iteration() -> None:
    state = replace(STATE, history=((8, "0"),))
    assert RunState.from_dict(state.to_dict()) == state


def test_checkpoints_of_0_2_0_are_read() -> None:
    """What that release wrote in a small run, while its solver worked on the second plan."""
    value = json.loads(Path(__file__).with_name("state-0.2.0.json").read_text())
    state, warning = resumed_state(value, 10)
    assert state is not None and warning is None
    assert state.plan.digest == state.history[-1][1]
    assert (state.schedule.refreshed, state.schedule.due_since) == (9, None)
    assert state.solve is not None and state.solve.apply_at == 12
    assert state.observations is not None and len(state.observations.linears) == 4
    assert state.guard is not None and state.guard.first_fallback is not None
    assert state.alerts
    again = state.to_dict()
    assert RunState.from_dict(again) == state
    assert value.keys() - again.keys() == {"delayed_scaling"}


@pytest.mark.parametrize(
    ("loaded", "iteration", "refreshed", "warning"),
    [
        (STATE.to_dict(), 7, 6, ""),
        (None, 0, None, ""),
        (None, 7, None, "iteration 7 has no SNIP state"),
        # Megatron can rewind its data loader (--override-ckpt-iteration).
        (STATE.to_dict(), 3, None, "a refresh in flight is dropped, and the guard starts anew"),
    ],
)
def test_a_checkpoints_state_is_resumed(
    loaded: Any, iteration: int, refreshed: int | None, warning: str
) -> None:
    state, found = resumed_state(loaded, iteration)
    assert (state is None) == (loaded is None)
    if state is not None:
        assert (state.iteration, state.schedule.refreshed) == (iteration, refreshed)
        assert state.plan == PLAN
        # The next checkpoint has it, and must be read.
        assert state.history == (((4, PLAN.digest),) if iteration >= 4 else ())
    assert warning in (found or "") and bool(warning) == (found is not None)


def test_a_target_whose_problem_is_dropped_is_planned_for_again() -> None:
    working = replace(STATE, target=0.75)
    assert working.for_weights_of(6).target == PLAN.target
    assert replace(working, solve=None).for_weights_of(6).target == 0.75


def test_a_resume_with_another_recipe_says_what_changes() -> None:
    config = SnipConfig(formats=("bf16", "fp8"))
    settings = reported_settings(config, "te", {"bf16": "bf16", "fp8": "blockwise"})
    state = RunState(iteration=3, plan=plan_of(["fp8"]), settings=settings)
    new = reported_settings(config, "te", {"bf16": "bf16", "fp8": "delayed_hybrid"})
    assert state.changes(new) == ["recipe of fp8 blockwise -> delayed_hybrid"]


def test_a_resume_that_only_measures_says_so() -> None:
    settings = reported_settings(SnipConfig(), "simulate", {})
    state = RunState(iteration=3, plan=plan_of(["fp8"]), settings=settings)
    new = reported_settings(SnipConfig(collect_only=True), "simulate", {})
    assert state.changes(new) == ["collect_only False -> True"]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("loss_divergence", "of a plugin"),
        ("stat_decay", 0.25),
        ("interval", 300),
        ("change_penalty", 0.5),
        ("guard", False),
        ("alert", ("underflow>0.3",)),
    ],
)
def test_a_resume_reports_every_setting_that_differs(setting: str, value: object) -> None:
    former = SnipConfig()
    state = RunState(
        iteration=3,
        plan=plan_of(["fp8"]),
        settings=reported_settings(former, "simulate", {}),
    )
    changed = former.model_copy(update={setting: value, "output_dir": Path("elsewhere")})
    (line,) = state.changes(reported_settings(changed, "simulate", {}))
    assert line.startswith(f"{setting} ")


def test_the_same_file_under_a_relative_path_is_no_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a checkpoint of an older version; now a job's paths are absolute."""
    monkeypatch.chdir(tmp_path)
    config = SnipConfig(cost="time", calibration=Path("a.json"), plan_file=Path("p.json"))
    settings = reported_settings(config, "te", {})
    state = RunState(iteration=3, plan=plan_of(["fp8"]), settings=settings)
    paths = {"calibration": tmp_path / "a.json", "plan_file": tmp_path / "p.json"}
    same = config.model_copy(update=paths)
    assert state.changes(reported_settings(same, "te", {})) == []
    assert changed_plan_settings(state, same) == set()
    other = same.model_copy(update={"calibration": tmp_path / "b.json"})
    assert changed_plan_settings(state, other) == {"calibration"}
    measured_again = {"calibration": "b" * 64}
    noted = reported_settings(config, "te", {}, {"calibration": "a" * 64})
    assert changed_plan_settings(replace(state, settings=noted), config, measured_again) == {
        "calibration"
    }
    auto = config.model_copy(update={"calibration": "auto"})
    assert changed_plan_settings(state, auto) == {"calibration"}

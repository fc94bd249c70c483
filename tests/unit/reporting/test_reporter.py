"""Who hears what, and that one who fails does not silence the others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_snip.divergence.quality import QualitySettings, divergence_table, problem_dict
from megatron_snip.options import Option, enumerate_options
from megatron_snip.planning.plan import read_plan
from megatron_snip.planning.planner import make_plan
from megatron_snip.planning.problem import PlanningProblem, read_problem
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.reporting.reporter import (
    Applied,
    Event,
    FileReporter,
    NullReporter,
    Refresh,
    Reporter,
    Reporters,
)
from megatron_snip.reporting.run_directory import RunDirectory
from tests.unit.divergence.build import errors, linear, table


def refresh() -> Refresh:
    statistics = table(linear(0), linear(1, stage=1, fp8=errors(1.0), fp4=errors(3.0)))
    options = enumerate_options(("fp8", "fp4"), "linear")
    settings = QualitySettings(options, "fp4", "fisher", 0.1)
    divergences = divergence_table(statistics, settings)
    problem = problem_dict(divergences, "fp4", target=0.5)
    return Refresh(30, statistics, divergences, problem, seconds=1.25)


def applied() -> Applied:
    problem = PlanningProblem.from_dict(refresh().problem)
    return Applied(make_plan(problem, PlanSettings(), step=30), 32, 2, 0.5)


class Listening:
    """Notes the names of what it hears."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.heard.append(name)


class Deaf:
    def __getattr__(self, name: str) -> Any:
        def fail(*_: Any) -> None:
            raise OSError(f"no {name}")

        return fail


def tell_all(reporter: Reporter) -> list[str]:
    """Send every message; return the errors."""
    failures = []
    messages: list[Any] = [
        lambda r: r.planned(applied()),
        lambda r: r.refreshed(refresh()),
        lambda r: r.event(Event(34, "kept", "why")),
        lambda r: r.metrics(34, {"loss": 2.0}),
        lambda r: r.close(),
    ]
    for message in messages:
        try:
            message(reporter)
        except OSError as error:
            failures.append(str(error))
    return failures


def test_all_hear_all_in_order() -> None:
    one, two = Listening(), Listening()
    tell_all(Reporters([one, two]))  # type: ignore[list-item]
    wanted = ["planned", "refreshed", "event", "metrics", "close"]
    assert one.heard == two.heard == wanted


def test_one_that_fails_is_heard_of_and_does_not_silence_the_others() -> None:
    one = Listening()
    failures = tell_all(Reporters([Deaf(), one]))  # type: ignore[list-item]
    assert one.heard == ["planned", "refreshed", "event", "metrics", "close"]
    assert failures == [f"no {name}" for name in one.heard]


def test_nobody_needs_to_listen() -> None:
    assert tell_all(NullReporter()) == []
    assert tell_all(Reporters([])) == []


def test_files_hold_what_was_told(tmp_path: Path) -> None:
    assert tell_all(FileReporter(RunDirectory(tmp_path))) == []
    assert read_problem(tmp_path / "problems" / "30.json").target == 0.5
    divergences = json.loads((tmp_path / "divergences" / "30.json").read_text())
    fp4 = divergences["linears"][1]["options"]["fp4"]
    assert fp4["loss_divergence"] == 21.0
    assert fp4["quality_loss"] == pytest.approx(
        refresh().divergences.linears[1].options[Option.uniform("fp4")].quality_loss
    )
    assert (tmp_path / "plans" / "30.json").is_file()
    (line,) = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    wall = line.pop("wall_s")
    assert wall >= 0
    assert line == {
        "step": 34,
        "loss": 2.0,
        "plan_step": 30,
        "changed_linears": 2,
        "wait_s": 0.5,
        "refresh_s": 1.25,
        "events": [{"kind": "kept", "message": "why"}],
    }


def test_the_plan_that_a_run_goes_on_with_is_written_where_it_is_not_yet(tmp_path: Path) -> None:
    before = applied()
    going_on = replace(before, step=40, num_changed=0, waited_s=0.0, resumed=True)
    for folder, told in (("here", [30, None]), ("elsewhere", [30])):
        if folder == "here":
            first = FileReporter(RunDirectory(tmp_path / folder))
            first.planned(before)
            first.metrics(39, {})
            first.close()
        again = FileReporter(RunDirectory(tmp_path / folder))
        again.planned(going_on)
        again.metrics(40, {})
        again.close()
        lines = (tmp_path / folder / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line).get("plan_step") for line in lines] == told
        assert read_plan(tmp_path / folder / "plans" / "30.json") == going_on.plan


def test_what_was_told_belongs_to_one_step(tmp_path: Path) -> None:
    reporter = FileReporter(RunDirectory(tmp_path))
    reporter.event(Event(1, "guard", "spike"))
    reporter.metrics(1, {"loss": 9.0})
    reporter.metrics(2, {"loss": 3.0})
    reporter.close()
    lines = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert "events" in lines[0]
    assert set(lines[1]) == {"step", "loss", "wall_s"}

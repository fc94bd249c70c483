"""Every file that is read may be hostile: an error of one line, or a correct result."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_snip.cli.script import read_argument_file
from megatron_snip.config import make_config
from megatron_snip.errors import UsageError
from megatron_snip.files import MAX_BYTES, read_json, read_yaml
from megatron_snip.linears.te.precision_config import PrecisionFile
from megatron_snip.options import Option
from megatron_snip.planning import solver_process
from megatron_snip.planning.calibration import read_calibration, with_seconds
from megatron_snip.planning.plan import assignment_digest, read_plan
from megatron_snip.planning.planner import make_plan
from megatron_snip.planning.problem import read_problem
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.planning.solver_process import PlanRequest
from megatron_snip.reporting.metrics_file import read_metrics
from megatron_snip.reporting.precision_record import read_precision
from megatron_snip.reporting.run_record import read_divergences
from megatron_snip.run.state import RunState
from megatron_snip.trainer.config import load_train_config
from tests.hostile.documents import (
    CALIBRATION,
    DIVERGENCES,
    METRICS,
    PLAN,
    PRECISION,
    PROBLEM,
    SNIP,
    TE_CONFIG,
    fuzzed,
    survives,
)
from tests.hostile.mutations import DEEP, mutants, paths, with_text
from tests.unit.run.build import STATE


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile") / "file.json"


FC1 = "decoder.layers.0.mlp.linear_fc1"


def use_plan(file: Path) -> None:
    plan = read_plan(file)  # then it is what its digest says
    assert plan.digest == assignment_digest(plan.linears)
    assert json.loads(file.read_bytes())["linears"] == plan.to_dict()["linears"]


def use_problem(file: Path) -> None:
    problem = read_problem(file)
    plan = make_plan(problem, PlanSettings(time_limit_s=5.0))
    assert list(plan.linears) == list(problem.names)


def use_state(file: Path) -> None:
    state = RunState.from_dict(read_json(file, "state"))
    assert RunState.from_dict(state.to_dict()) == state


def use_calibration(file: Path) -> None:
    seconds = with_seconds(PROBLEM, read_calibration(file)).linears[0].options["fp8"].seconds
    assert seconds is None or seconds >= 0


def imported(file: Path) -> Option:
    precision = PrecisionFile(read_yaml(file), "'file'")
    precision.has_evaluation_recipes()
    return precision.option(FC1, Option.parse("bf16"))


def use_precision_file(file: Path) -> None:
    assert isinstance(imported(file), Option)


def use_metrics(file: Path) -> None:
    metrics = read_metrics(file)
    assert metrics.notices is not None
    metrics.column("loss")
    metrics.last("loss")


READERS: dict[str, tuple[dict[str, Any], Callable[[Path], object]]] = {
    "plan": (PLAN.to_dict(), use_plan),
    "problem": (PROBLEM.to_dict(), use_problem),
    "state of a checkpoint": (STATE.to_dict(), use_state),
    "divergences": (DIVERGENCES, read_divergences),
    "calibration": (CALIBRATION, use_calibration),
    "precision file": (TE_CONFIG, use_precision_file),  # JSON is YAML
    "precision record": (PRECISION, lambda file: read_precision(file).overview()),
    "metrics": (METRICS, use_metrics),
    "settings": (SNIP, lambda file: make_config(read_yaml(file))),
    "trainer": (
        {"num_layers": 2, "snip": SNIP, "run_dir": "x"},
        lambda file: load_train_config(file, {}, {}),
    ),
}
"""Kind of file -> a good document, and how it is read and used."""


@pytest.mark.parametrize("kind", READERS)
def test_a_hostile_file_is_an_error_of_one_line_or_read_correctly(kind: str, file: Path) -> None:
    document, use = READERS[kind]
    file.write_text(json.dumps(document) + "\n")
    use(file)  # the document itself is fine
    for number in ("1e999", "9" * 400):  # the parser lets them pass
        for at in paths(document):
            file.write_text(with_text(document, at, number) + "\n")
            survives(lambda: use(file))

    @fuzzed
    @given(content=mutants(document), end=st.sampled_from([b"", b"\n"]))
    def one(content: bytes, end: bytes) -> None:
        file.write_bytes(content + end)
        survives(lambda: use(file))

    one()


@fuzzed
@given(content=st.one_of(st.binary(max_size=200), st.text(max_size=80).map(str.encode)))
def test_argument_files(content: bytes, file: Path) -> None:
    file.write_bytes(content)
    survives(lambda: read_argument_file(file))


REQUEST = PlanRequest(problem=PROBLEM, settings=PlanSettings(), previous=PLAN, iteration=3)


@settings(fuzzed, max_examples=40)
@given(content=mutants(json.loads("".join(REQUEST.json_pieces()))))
def test_the_solver_process_always_answers_with_one_line(content: bytes) -> None:
    reply = solver_process.answer(content.decode(errors="replace").replace("\n", " "))
    assert reply.endswith("\n") and reply.count("\n") == 1
    assert set(json.loads(reply)) in ({"plan"}, {"error", "message"})


YAMLS = {
    "objects": "!!python/object/apply:os.system ['touch pwned']",
    "laughs": "a: &a [x,x]\n"
    + "".join(f"{c}: &{c} [*{p},*{p},*{p}]\n" for p, c in pairwise("abcdefghijklmnopq")),
    "deep": "a: " + DEEP,
    "date": "interval: 2026-13-45",
    "digits": "interval: " + "9" * 5000,
    "hexadecimal digits": "interval: 0x" + "9" * 5000,
    "base 60": "a: 1" + ":59" * 340_000,
    "a float in base 60": "a: 1" + ":59" * 340_000 + ".5",
    "key": "? [a]\n: 1",
    "twice": "interval: 5\ninterval: 6",
    "cycle": "&a [*a]",
    "cyclic mapping": "snip: &a\n  b: *a",
    "bytes": "\x00",
    "bool": "a: !!bool maybe",
    "timestamp": "a: !!timestamp foo",
    "int": "a: !!int ''",
    "list": "- 1",
}


@pytest.mark.parametrize("name", YAMLS)
def test_yaml_of_all_sorts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "snip.yaml"
    path.write_text(YAMLS[name])
    values = survives(lambda: read_yaml(path))
    if values is not None:
        assert survives(lambda: make_config(values)) is None
    assert sorted(p.name for p in tmp_path.iterdir()) == ["snip.yaml"]


@pytest.mark.parametrize("text", ["&a [*a]", "a: &x\n  b: {c: [*x]}", "a: &a\n  <<: *a"])
def test_yaml_that_contains_itself_is_refused(text: str, tmp_path: Path) -> None:
    """Whoever walks through it would never end."""
    path = tmp_path / "snip.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match="contains itself"):
        read_yaml(path)
    path.write_text("a: &a [1]\nb: [*a, *a]")
    assert read_yaml(path) == {"a": [1], "b": [[1], [1]]}


@pytest.mark.parametrize("read", [read_plan, read_problem, read_divergences, read_yaml])
def test_what_is_no_file_of_usual_size_is_refused(
    read: Callable[[Path], Any], tmp_path: Path
) -> None:
    endless = tmp_path / "endless.json"
    endless.symlink_to("/dev/zero")
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    huge = tmp_path / "huge.json"
    with huge.open("wb") as stream:
        stream.truncate(MAX_BYTES + 1)  # sparse: it takes no space
    loop = tmp_path / "loop.json"
    loop.symlink_to(loop)
    for path in (endless, pipe, huge, loop, tmp_path, tmp_path / "nowhere.json"):
        assert survives(lambda path=path: read(path)) is None  # type: ignore[misc]

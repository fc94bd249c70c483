"""`megatron-snip plan`: the plan as JSON and as a table, exit statuses, bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_snip.__main__ import main
from megatron_snip.planning.plan import PrecisionPlan, write_plan
from megatron_snip.planning.problem import write_problem
from tests.unit.planning.build import name_of, options_of, plan_of, problem_of

PROBLEM = problem_of(
    [[0.0, 1.0], [0.0, 2.0], [3.79e-14, 3.0], [0.0, 4.0]], target=0.5, stages=[0, 0, 1, 1]
)


@pytest.fixture
def problem(tmp_path: Path) -> str:
    path = tmp_path / "problem.json"
    write_problem(PROBLEM, path)
    return str(path)


@pytest.fixture
def previous(tmp_path: Path) -> str:
    path = tmp_path / "previous.json"
    write_plan(plan_of(["fp8", "fp8", "fp4", "fp4"]), path)
    return str(path)


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> PrecisionPlan:
    """Run `plan ... --json`; return the plan that it prints."""
    assert main(["plan", *words, "--json"]) == 0
    return PrecisionPlan.from_dict(json.loads(capsys.readouterr().out))


def table(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, list[str]]:
    """Run `plan`; return the words of each line of its output, by the first one."""
    assert main(["plan", *words]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text and max(map(len, text.splitlines())) <= 100
    return {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}


def test_the_table_has_the_choices_the_quality_and_no_solver_noise(
    problem: str, previous: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = table(capsys, problem, "--previous", previous)
    changed = ["fp4", "fp8", "0", "1.000", "1.000", "25.0%"]  # fp8 before, stage 0
    assert lines[name_of(0)][1:] == changed
    assert lines[name_of(2)][1:] == ["fp8", "fp4", "1", "0.000", "0.000", "25.0%"]  # not 3.79e-14
    assert lines["policy"][1:3] == ["snip,", "optimal,"]
    assert lines["efficiency"][1] == "0.500000"
    assert main(["plan", problem]) == 0
    text = capsys.readouterr().out
    assert "quality loss: predicted harm" in text  # the heads are explained
    assert "efficiency by pipeline stage: stage 0 1.0000, stage 1 0.0000" in text


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ([], ["fp4", "fp4", "fp8", "fp8"]),
        (["--target", "0.25"], ["fp4", "fp8", "fp8", "fp8"]),
        (["--pipeline-balance", "stage"], ["fp4", "fp8", "fp4", "fp8"]),
        (["--pin", "*.layers.0.*=fp8", "--pin", "*.1.*=bf16"], ["fp8", "bf16", "fp4", "fp4"]),
        (["--first-layers", "1=bf16", "--last-layers", "1=fp4"], ["bf16", "fp4", "fp8", "fp4"]),
        (["--policy", "uniform-fp8"], ["fp8"] * 4),
        (["--policy", "layer-id"], ["fp8", "fp4", "fp4", "fp8"]),
        (
            ["--time-limit", "5", "--seed", "3", "--workers", "1", "--gap", "0"],
            ["fp4"] * 2 + ["fp8"] * 2,
        ),
    ],
)
def test_flags_reach_the_planner(
    problem: str, words: list[str], options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert options_of(plan(capsys, problem, *words)) == options


def test_changes_have_a_price(
    problem: str, previous: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [problem, "--previous", previous, "--change-penalty"]
    assert options_of(plan(capsys, *words, "0.1")) == ["fp4", "fp4", "fp8", "fp8"]
    assert options_of(plan(capsys, *words, "9")) == ["fp8", "fp8", "fp4", "fp4"]


def test_infeasible_constraints_exit_with_3_and_are_named(
    problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", problem, "--target", "0.9", "--pin", "*.layers.1.*=fp8"]
    assert main(words) == 3
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    for word in ("target 0.9", "pin *.layers.1.*=fp8", "0.75"):
        assert word in captured.err
    assert main([*words, "--json"]) == 3
    assert json.loads(capsys.readouterr().out) == {
        "version": 1,
        "status": "infeasible",
        "conflicts": ["target 0.9", "pin *.layers.1.*=fp8"],
        "best_target": 0.75,
    }


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--target", "1.5"], "--target: must be less than or equal to 1, got '1.5'"),
        (
            ["--target", "abc"],
            "--target: must be a valid number, got 'abc'; see 'megatron-snip plan",
        ),
        (["--pin", "=fp8"], "--pin: '=fp8' is not of the form ...=OPTION"),
        (["--pin", "encoder.*=fp8"], "no linear's name matches"),
        (["--first-layers", "x=fp8"], "--first-layers: must be a valid integer, got 'x'"),
        (["--change-penalty", "2"], "needs --previous"),
        (["--workers", "0"], "--workers: "),
        (["--pipeline-balance", "some"], "--pipeline-balance"),
        (["--cost", "watts"], "--cost"),
        (["--policy", "snp"], "unknown policy 'snp' (did you mean 'snip'?)"),
        (["--policy", "SNIP"], "unknown policy 'SNIP' (did you mean 'snip'?)"),
        (["--calibration", "absent.json"], "--cost time"),
        (["--policy", "uniform-fp4", "--target", "0.5"], "does not use --target"),
        (["--cost", "time"], "calibrate"),
        (["--output", "/absent/folder/plan.json"], "cannot write"),
        (["--taget", "1"], "unknown flag '--taget' (did you mean '--target'?)"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    problem: str, words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", problem, *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("megatron-snip: error: ")
    assert complaint in captured.err and captured.err.count("\n") == 1


def test_a_bad_file_is_named(
    problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.json"
    write_plan(plan_of(["fp8"] * 3), path)
    assert main(["plan", problem, "--previous", str(path)]) == 2
    error = capsys.readouterr().err
    assert "other.json" in error and name_of(3) in error
    text = Path(problem).read_text()
    empty = '{"version": 1, "linears": [], "target": 0.5}'
    for bad in (text.replace('"fp4"', '"fp9"'), "", "{}", empty, empty.replace("0.5", "NaN")):
        path.write_text(bad)
        assert main(["plan", str(path)]) == 2
        error = capsys.readouterr().err
        assert "other.json" in error and error.count("\n") == 1

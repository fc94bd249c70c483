import json
from pathlib import Path

import pytest

from megatron_snip.__main__ import main
from megatron_snip.planning.checker import find_violations
from megatron_snip.planning.plan import PrecisionPlan, read_plan, write_plan
from megatron_snip.planning.problem import PlanningProblem, write_problem
from megatron_snip.planning.settings import PlanSettings
from tests.unit.planning.build import name_of, options_of, plan_of, problem_of

PROBLEM = problem_of(
    [[0.0, 1.0], [0.0, 2.0], [0.0, 3.0], [0.0, 4.0]], target=0.5, stages=[0, 0, 1, 1]
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
    captured = capsys.readouterr()
    return PrecisionPlan.from_dict(json.loads(captured.out))


def test_json_is_the_plan_and_nothing_else(
    problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made = plan(capsys, problem)
    assert options_of(made) == ["fp4", "fp4", "fp8", "fp8"]
    assert find_violations(made, PROBLEM, PlanSettings()) == []


def test_the_table_says_what_was_chosen_and_how_good_it_is(
    problem: str, previous: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", problem, "--pipeline-balance", "stage", "--previous", previous]) == 0
    text = capsys.readouterr().out
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert "fp4" in lines[name_of(0)]
    assert lines[name_of(0)].split()[-1] == "fp8"  # what it was before
    assert "optimal" in lines["status"]
    assert lines["objective"].split()[1] == "4"
    assert "gap" in lines["bound"]
    assert lines["efficiency"].split()[1] == "0.500000"
    assert lines["stages"].split()[1:] == ["0.500000,", "0.500000"]
    assert "\x1b" not in text


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["--target", "0.25"], ["fp4", "fp8", "fp8", "fp8"]),
        (["--pipeline-balance", "stage"], ["fp4", "fp8", "fp4", "fp8"]),
        (["--pin", "*.layers.0.*=fp8"], ["fp8", "fp4", "fp4", "fp8"]),
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
    base = [problem, "--previous", previous]
    assert options_of(plan(capsys, *base)) == ["fp4", "fp4", "fp8", "fp8"]
    same = plan(capsys, *base, "--change-penalty", "9", "--iteration", "40")
    assert (options_of(same), same.iteration) == (["fp8", "fp8", "fp4", "fp4"], 40)


def test_a_previous_plan_of_another_model_is_told_by_its_file(
    problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.json"
    write_plan(plan_of(["fp8"] * 3), path)
    assert main(["plan", problem, "--previous", str(path)]) == 2
    err = capsys.readouterr().err
    assert "other.json" in err and f"the plan does not have {name_of(3)}" in err


def test_the_plan_is_written_where_asked(
    problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    made = plan(capsys, problem, "--output", str(path))
    assert read_plan(path) == made


def test_infeasible_rules_exit_with_3_and_say_why(
    problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", problem, "--target", "0.9", "--pin", "*.layers.1.*=fp8"]
    assert main(words) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    for word in ("target 0.9", "pin *.layers.1.*=fp8", "best reachable target is 0.75"):
        assert word in captured.err
    assert captured.err.count("\n") == 1
    assert main([*words, "--json"]) == 3
    assert json.loads(capsys.readouterr().out) == {
        "version": 1,
        "status": "infeasible",
        "conflicts": ["target 0.9", "pin *.layers.1.*=fp8"],
        "best_target": 0.75,
    }


@pytest.mark.parametrize(
    ("words", "word"),
    [
        (["--target", "1.5"], "--target: "),
        (["--target", "nan"], "--target: "),
        (["--target", "high"], "--target: "),
        (["--pin", "fp8"], "GLOB=OPTION"),
        (["--pin", "=fp8"], "GLOB=OPTION"),
        (["--pin", "encoder.*=fp8"], "no linear's name matches"),
        (["--pin", "*=fp5"], "fp5"),
        (["--first-layers", "x=fp8"], "--first-layers: 'x=fp8' is not N=OPTION"),
        (["--first-layers", "2"], "N=OPTION"),
        (["--change-penalty", "-1"], "--change-penalty: "),
        (["--workers", "0"], "--workers: "),
        (["--seed", "-1"], "--seed: "),
        (["--gap", "-1"], "--gap: "),
        (["--previous", "absent.json"], "absent.json"),
        (["--policy", "best"], "unknown policy 'best'"),
        (["--policy", "min-abs-err"], "abs_error"),
        (["--cost", "time", "--calibration", "absent.json"], "absent.json"),
        (["--calibration", "absent.json"], "--cost time"),
        (["--policy", "uniform-fp4", "--target", "0.5"], "policy 'uniform-fp4'"),
        (["--policy", "uniform-fp4", "--target", "0.5"], "cannot heed --target"),
        (["--policy", "uniform-fp8", "--pipeline-balance", "stage"], "--pipeline-balance"),
        (["--policy", "none", "--pipeline-balance", "bottleneck"], "--pipeline-balance"),
        (["--cost", "time"], "calibrate"),
        (["--pipeline-balance", "some"], "invalid choice"),
        (["--time-limit", "0"], "--time-limit: "),
        (["--iteration", "-3"], "iteration"),
        (["--iteration", "9" * 19], "at most 18 digits"),
        (["--iteration", "9" * 5000], "at most 18 digits"),
        (["--output", "/absent/folder/plan.json"], "cannot write"),
        (["--unknown"], "--unknown"),
    ],
)
def test_bad_input_exits_with_2_and_one_line(
    problem: str, words: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", problem, *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("megatron-snip: error: ")
    assert word in captured.err
    assert captured.err.count("\n") == 1


def test_a_policy_without_target_says_so_and_keeps_to_the_rest(
    problem: str, previous: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", problem, "--policy", "uniform-fp8"]) == 0
    assert "(uniform-fp8 heeds no target)" in capsys.readouterr().out


def test_a_uniform_policy_does_not_take_what_is_forbidden(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "null.json"
    write_problem(problem_of([[0.0, 1.0], [0.0, None]]), path)
    assert main(["plan", str(path), "--policy", "uniform-fp4", "--json"]) == 3
    captured = capsys.readouterr()
    assert json.loads(captured.out)["conflicts"] == ["policy uniform-fp4", "forbidden options"]
    assert name_of(1) in captured.err
    assert main(["plan", str(path), "--policy", "uniform-fp4", "--pin", f"{name_of(1)}=fp8"]) == 0


def test_stages_without_linears_are_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "late.json"
    write_problem(problem_of([[0.0, 1.0]] * 4, stages=[5, 5, 9000, 9000]), path)
    assert main(["plan", str(path), "--pipeline-balance", "stage"]) == 0
    text = capsys.readouterr().out
    lines = [line.split() for line in text.splitlines() if line.strip()]
    assert [line for line in lines if line[0] == "stages"] == [
        ["stages", "stage", "5:", "0.500000,", "stage", "9000:", "0.500000"]
    ]
    assert ["5", "2", "0.5000", "1"] in lines
    assert ["9000", "2", "0.5000", "1"] in lines
    assert sum(line[0].isdecimal() for line in lines) == 2


def test_names_are_printed_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "names.json"
    linear = problem_of([[0.0, 1.0]]).linears[0]
    names = ("[/red]", "[bold]b[/bold]", ":fire:")
    linears = tuple(linear.model_copy(update={"name": name}) for name in names)
    write_problem(PlanningProblem(linears=linears, target=0.5), path)
    assert main(["plan", str(path)]) == 0
    text = capsys.readouterr().out
    for name in names:
        assert name in text


def test_an_unknown_format_is_told_by_file_and_linear(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "fp9.json"
    write_problem(PROBLEM, path)
    text = path.read_text()
    path.write_text(text.replace('"fp4"', '"fp9"'))
    assert main(["plan", str(path)]) == 2
    err = capsys.readouterr().err
    for word in ("fp9.json", f"linear '{name_of(0)}'", "unknown format 'fp9'"):
        assert word in err


def test_a_bad_problem_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.json"
    empty = '{"version": 1, "linears": [], "target": 0.5}'
    for text in ("", "{}", empty, empty.replace("0.5", "NaN")):
        path.write_text(text)
        assert main(["plan", str(path)]) == 2
        assert "bad.json" in capsys.readouterr().err
    assert main(["plan", str(tmp_path / "absent.json")]) == 2


def test_local_errors_come_from_the_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = [{"abs_error": error, "rel_error": 1 / error} for error in (4.0, 3.0, 2.0, 1.0)]
    write_problem(problem_of([[0.0, 1.0]] * 4, scores=scores), tmp_path / "20.json")
    path = str(tmp_path / "20.json")
    assert options_of(plan(capsys, path, "--policy", "min-abs-err"))[2:] == ["fp4", "fp4"]
    assert options_of(plan(capsys, path, "--policy", "min-rel-err"))[:2] == ["fp4", "fp4"]


def test_large_models_are_summed_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "large.json"
    linears = problem_of([[0.0, 1.0]] * 1600, target=0.5).linears
    write_problem(PlanningProblem(linears=linears, target=0.5), path)
    assert main(["plan", str(path)]) == 0
    text = capsys.readouterr().out
    assert name_of(0) not in text
    row = next(line for line in text.splitlines() if "linear_fc1" in line)
    assert row.split() == ["linear_fc1", "800", "800"]

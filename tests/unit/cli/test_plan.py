"""`megatron-snip plan` and `pareto`: tables, JSON and exit statuses."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import to_json

from megatron_snip.__main__ import main
from megatron_snip.config import SnipConfig
from megatron_snip.divergence.quality_loss import (
    LOSS_DIVERGENCES,
    divergence_table,
    divergences_dict,
    planning_problem,
    read_statistics,
)
from megatron_snip.options import Granularity, Option, enumerate_options
from megatron_snip.planning.plan import PrecisionPlan, write_plan
from megatron_snip.planning.planner import frontier, make_plan
from megatron_snip.planning.problem import PlanningProblem, write_problem
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.statistics.records import LinearStatistics
from tests.unit.divergence import build
from tests.unit.planning.build import name_of, options_of, plan_of, problem_of

PROBLEM = problem_of(
    [[0.0, 1.0], [0.0, 2.0], [3.79e-14, 3.0], [0.0, 4.0]], target=0.5, stages=[0, 0, 1, 1]
)


@pytest.fixture
def previous(tmp_path: Path) -> str:
    path = tmp_path / "previous.json"
    write_plan(plan_of(["fp8", "fp8", "fp4", "fp4"]), path)
    return str(path)


def printed_options(printed: Any, *words: str) -> list[str]:
    """Return the options of the plan that `plan ... --json` prints."""
    return options_of(PrecisionPlan.from_dict(json.loads(printed("plan", *words, "--json"))))


def test_the_table_has_the_choices_the_quality_and_no_solver_noise(
    problem: str, previous: str, printed: Any
) -> None:
    text = printed("plan", problem, "--previous", previous)
    assert "\x1b" not in text and max(map(len, text.splitlines())) <= 100
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    changed = ["fp4", "fp8", "0", "1.000", "1.000", "25.0%"]  # fp8 before, stage 0
    assert lines[name_of(0)][1:] == changed
    assert lines[name_of(2)][1:] == ["fp8", "fp4", "1", "0.000", "0.000", "25.0%"]  # not 3.79e-14
    assert lines["policy"][1:3] == ["snip,", "optimal,"]
    assert lines["efficiency"][1] == "0.500000"
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
        (["--target", "0", "--last-layers", "2=bf16"], ["fp8", "fp8", "bf16", "bf16"]),
        (["--policy", "uniform-fp8"], ["fp8"] * 4),
        (["--policy", "layer-id"], ["fp8", "fp4", "fp4", "fp8"]),
        (
            ["--time-limit", "5", "--seed", "3", "--workers", "1", "--gap", "0"],
            ["fp4", "fp4", "fp8", "fp8"],
        ),
    ],
)
def test_flags_reach_the_planner(
    problem: str, words: list[str], options: list[str], printed: Any
) -> None:
    assert printed_options(printed, problem, *words) == options


def test_the_pins_of_the_run_hold_where_no_other_pin_does(tmp_path: Path, printed: Any) -> None:
    pinned = PROBLEM.model_copy(update={"pins": (("*.layers.[01].*", "fp8"),)})
    file = tmp_path / "pinned.json"
    write_problem(pinned, file)
    assert printed_options(printed, file) == ["fp8", "fp8", "fp4", "fp4"]
    words = ["--pin", "*.layers.0.*=bf16", "--target", "0.25"]
    assert printed_options(printed, file, *words) == ["bf16", "fp8", "fp4", "fp8"]
    points = json.loads(printed("pareto", file, "--targets", "0.5,0.75", "--json"))
    assert [point["status"] for point in points] == ["optimal", "infeasible"]


def test_a_pin_of_a_tied_linear_replaces_the_run_s_pin_of_the_other(
    tmp_path: Path, printed: Any
) -> None:
    ties = (PROBLEM.names[:2],)
    pinned = PROBLEM.model_copy(update={"pins": (("*.layers.[01].*", "fp8"),), "ties": ties})
    file = tmp_path / "tied.json"
    write_problem(pinned, file)
    words = ["--pin", f"{PROBLEM.names[0]}=fp4", "--target", "0.5"]
    assert printed_options(printed, file, *words)[:2] == ["fp4", "fp4"]


def test_a_run_s_pins_can_be_freed(tmp_path: Path, printed: Any) -> None:
    """As in a run, other given pins go before it; both commands that plan have it."""
    pinned = PROBLEM.model_copy(update={"pins": (("*.layers.[01].*", "fp8"),)})
    file = tmp_path / "pinned.json"
    write_problem(pinned, file)
    assert printed_options(printed, file, "--pin", "*=free") == ["fp4", "fp4", "fp8", "fp8"]
    words = ["--pin", "*.layers.0.*=free"]
    assert printed_options(printed, file, *words) == ["fp4", "fp8", "fp4", "fp8"]
    assert printed_options(printed, file, "--first-layers", "1=free") == printed_options(
        printed, file, *words
    )
    words += ["--pin", f"{PROBLEM.names[0]}=fp8"]
    assert printed_options(printed, file, *words) == ["fp8", "fp8", "fp4", "fp4"]
    words = ["--pin", "*=free", "--targets", "1", "--json"]
    assert json.loads(printed("pareto", file, *words))[0]["status"] == "optimal"


def test_a_freed_linear_has_only_options_that_others_may_choose(
    tmp_path: Path, printed: Any
) -> None:
    """A rule of the job had fixed it to an option that was not measured, so that it costs 0."""
    first, *others = PROBLEM.linears
    options = {**first.options, "mxfp8": first.options["fp8"].model_copy()}
    pinned = PROBLEM.model_copy(
        update={
            "linears": (first.model_copy(update={"options": options}), *others),
            "pins": ((first.name, "mxfp8"),),
        }
    )
    file = tmp_path / "pinned.json"
    write_problem(pinned, file)
    assert printed_options(printed, file)[0] == "mxfp8"
    words = ["--pin", "*.layers.0.*=free", "--target", "0"]
    assert printed_options(printed, file, *words)[0] == "fp8"


@pytest.mark.parametrize(
    ("glob", "said"),
    [
        ("*.layers.3.*", "frees nothing: the problem file has no pin"),
        ("encoder.*", "no linear's name matches"),
        ("*.layers.0.*", "are fused"),
    ],
)
def test_a_pin_that_frees_nothing_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], glob: str, said: str
) -> None:
    ties = (PROBLEM.names[:2],)
    pinned = PROBLEM.model_copy(update={"pins": (("*.layers.[01].*", "fp8"),), "ties": ties})
    file = tmp_path / "tied.json"
    write_problem(pinned, file)
    assert main(["plan", str(file), "--pin", f"{glob}=free"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and said in error


def test_changes_have_a_price(problem: str, previous: str, printed: Any) -> None:
    words = [problem, "--previous", previous, "--change-penalty"]
    assert printed_options(printed, *words, "0.1") == ["fp4", "fp4", "fp8", "fp8"]
    assert printed_options(printed, *words, "9") == ["fp8", "fp8", "fp4", "fp4"]


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


# ---- pareto ------------------------------------------------------------------------------------


def test_ranges_include_both_ends_and_are_exact(problem: str, printed: Any) -> None:
    for text, targets in (
        ("0:1:0.05", [k / 20 for k in range(21)]),
        ("0.1:0.5:0.3", [0.1, 0.4]),
        ("0.75, 0.5", [0.5, 0.75]),
        ("0:0,200:0.75", [0.0, 0.75]),
    ):
        points = json.loads(printed("pareto", problem, "--targets", text, "--json"))
        assert [point["target"] for point in points] == targets


def test_the_frontier_as_table_and_json(tmp_path: Path, printed: Any) -> None:
    problem = tmp_path / "frontier.json"
    losses = [[0.0, 1.0], [0.0, 2.0], [0.0, 3.0], [3.79e-14, None]]
    write_problem(problem_of(losses), problem)
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
    assert printed("pareto", problem, "--targets", "0.9,1", status=3).count("infeasible") == 2


def measured_run(folder: Path) -> tuple[Path, PlanningProblem]:
    """A run that measured by linear, and the problem that it would have made by GEMM.

    One linear was not reached by a backward.
    """
    linears = [
        build.linear(i, fp8=build.errors(i + 1), fp4=build.errors(9.0 * i + 4)) for i in (0, 1)
    ]
    statistics = build.table(*linears, build.linear(2, microbatches=0))
    settings = SnipConfig(formats=("fp8", "fp4"))
    problems = []
    for granularity in ("linear", "gemm"):
        options = enumerate_options(settings.formats, granularity)
        table = divergence_table(statistics, options, "fp4", settings)
        problems.append(planning_problem(table, 0.5))
        if granularity == "linear":
            (folder / "divergences").mkdir(parents=True)
            file = folder / "divergences" / "30.json"
            file.write_text(to_json(divergences_dict(table)).decode())
    (folder / "problems").mkdir()
    write_problem(problems[0], folder / "problems" / "30.json")
    (folder / "config.yaml").write_text("snip: {formats: [fp8, fp4]}\n")
    return folder / "problems" / "30.json", problems[1]


@pytest.mark.parametrize("policy", ["snip", "grads-first"])
def test_a_run_that_measured_by_linear_is_planned_by_gemm(
    policy: str, tmp_path: Path, printed: Any
) -> None:
    """With the quality losses that a run by GEMM has."""
    file, by_gemm = measured_run(tmp_path / "run")
    words = ["plan", file, "--granularity", "gemm", "--policy", policy, "--json"]
    plan = PrecisionPlan.from_dict(json.loads(printed(*words)))
    wanted = make_plan(by_gemm, PlanSettings(policy=policy))
    assert plan.linears == wanted.linears and plan.objective == wanted.objective
    assert any(len(set(option.formats)) > 1 for option in plan.linears.values())
    points = json.loads(
        printed("pareto", file, "--granularity", "gemm", "--targets", "0.5", "--json")
    )
    assert points[0]["objective"] == make_plan(by_gemm, PlanSettings()).objective


@pytest.mark.parametrize("granularity", [None, "linear", "gemm"])
def test_another_divergence_is_planned_with_as_a_run_with_it_would(
    granularity: Granularity | None,
    tmp_path: Path,
    printed: Any,
    refused: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def error(linear: LinearStatistics, option: Option) -> float:
        return 0.0 if option.fprop == "bf16" else linear.formats[option.fprop].input_error_square

    monkeypatch.setitem(LOSS_DIVERGENCES, "ours", error)
    file, _ = measured_run(tmp_path / "run")
    statistics = read_statistics(tmp_path / "run" / "divergences" / "30.json")
    settings = SnipConfig(formats=("fp8", "fp4"), loss_divergence="ours")
    options = enumerate_options(settings.formats, granularity or "linear")
    table = divergence_table(statistics, options, "fp4", settings)
    wanted = frontier(planning_problem(table, 0.5), PlanSettings(), (0.25, 0.5))
    words = [file, "--loss-divergence", "ours"]
    words += ["--granularity", granularity] if granularity else []
    points = json.loads(printed("pareto", *words, "--targets", "0.25,0.5", "--json"))
    assert [point["objective"] for point in points] == [
        pytest.approx(plan.objective) for plan in wanted.values() if plan is not None
    ]
    own = json.loads(printed("pareto", file, "--targets", "0.25,0.5", "--json"))
    assert [point["objective"] for point in own] != [point["objective"] for point in points]
    assert "unknown weight_divergence 'x'" in refused("plan", file, "--weight-divergence", "x")


def test_measurements_of_version_2_are_planned_with_by_norms(
    tmp_path: Path, printed: Any, refused: Any
) -> None:
    """They were of runs with products, as the settings of the run say."""
    file, _ = measured_run(tmp_path / "run")
    wanted = json.loads(printed("plan", file, "--granularity", "gemm", "--json"))
    divergences = tmp_path / "run" / "divergences" / "30.json"
    value = json.loads(divergences.read_text()) | {"version": 2}
    for linear in value["linears"]:
        linear["statistics"]["output_square"] = 1.0
        for row in linear["statistics"]["formats"].values():
            row["fisher"] = 7.0
    divergences.write_text(json.dumps(value))
    settings = "formats: [fp8, fp4], loss_divergence: fisher, weight_divergence: updates"
    settings += ", weight_lambda: 0.01, alert: [gemm_sqnr_db<6]"
    (tmp_path / "run" / "config.yaml").write_text(f"snip: {{{settings}}}\n")
    words = ["--granularity", "gemm", "--json"]
    text = refused("plan", file, *words)
    assert "loss_divergence 'fisher' needs products, which are not measured; use norms" in text
    by_norms = ["--loss-divergence", "norms", "--weight-divergence", "norms"]
    found = json.loads(printed("plan", file, *words, *by_norms))
    assert found == {**wanted, "seconds": found["seconds"]}


def test_a_problem_by_gemm_is_planned_by_linear(tmp_path: Path, printed: Any) -> None:
    file, by_gemm = measured_run(tmp_path / "run")
    own = tmp_path / "gemm.json"
    write_problem(by_gemm, own)
    by_linear = printed("plan", own, "--granularity", "linear", "--json")
    wanted = PrecisionPlan.from_dict(json.loads(printed("plan", file, "--json")))
    assert PrecisionPlan.from_dict(json.loads(by_linear)).linears == wanted.linears


def test_statistics_that_are_missing_or_of_other_linears_are_named(
    tmp_path: Path, problem: str, refused: Any
) -> None:
    assert "needs what the refresh measured" in refused("plan", problem, "--granularity", "gemm")
    file, _ = measured_run(tmp_path / "run")
    write_problem(PROBLEM, file)
    assert "is of other linears than" in refused("plan", file, "--granularity", "gemm")
    (tmp_path / "run" / "divergences" / "30.json").write_text('{"linears": [{}]}')
    assert "has no statistics of its linears" in refused("plan", file, "--granularity", "gemm")

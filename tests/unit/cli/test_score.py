"""`megatron-snip score` and `diff`: any recipe by a run's measurements; what changed, and why."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_snip.__main__ import main
from megatron_snip.planning.plan import write_plan
from megatron_snip.planning.problem import (
    LinearChoices,
    OptionCost,
    PlanningProblem,
    write_problem,
)
from tests.processes import ROOT
from tests.unit.planning.build import name_of, plan_of, problem_of

PROBLEM = problem_of([[0.0, 1.0], [0.0, 2.0], [0.0, 3.0], [0.0, 4.0]], target=0.5)

PRECISION_FILE = """\
configs:
  low:
    transformer_engine_config_type: TEQuantizationParams
    training_recipe: {fp8_quantization_recipe: custom, override_nonquantized_autocast: true}
  high:
    transformer_engine_config_type: TEQuantizationParams
    training_recipe: {}
matchers:
  first: {type: glob, pattern: "*.layers.0.*", config: high, enabled: true}
  none: {type: glob, pattern: "*.layers.77.*", config: high, enabled: true}
"""


NEMOTRON = ROOT / "configs" / "precision" / "nemotron-3-super.yaml"
PATTERN = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
"""Layers of the model: Mamba, experts, attention (--hybrid-layer-pattern)."""
EXPERTS = ("experts.linear_fc1", "experts.linear_fc2", "shared_experts.linear_fc1")
EXPERTS += ("shared_experts.linear_fc2", "fc1_latent_proj", "fc2_latent_proj")
KINDS = {
    "M": ("mixer.in_proj", "mixer.out_proj"),
    "*": ("self_attention.linear_qkv", "self_attention.linear_proj"),
    "E": tuple(f"mlp.{name}" for name in EXPERTS),
}


@pytest.fixture
def plan(tmp_path: Path) -> str:
    path = tmp_path / "plan.json"
    write_plan(plan_of(["fp4", "fp8", "fp8", "fp4"]), path)
    return str(path)


def test_plans_files_policies_and_rules_stand_in_one_table(
    problem: str, plan: str, printed: Any, tmp_path: Path
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(PRECISION_FILE)
    things = (plan, file, "layer-id:0.5", "last-blocks:0.25", "first-last:1,1")
    text = printed("score", problem, *things, "--base", "fp4")
    assert max(map(len, text.splitlines())) <= 100
    table = text.partition("plan.json\n")[0]
    lines = {line.split()[0]: line.split() for line in table.splitlines() if line.strip()}
    # Share, quality loss, SNIP's at that share, the best rule's.
    assert lines["first-last:1,1"][1:4] == ["50%", "5.000", "3.000"]
    assert lines["last-blocks:0.25"][1:4] == ["75%", "6.000", "6.000"]
    named = f"low, and cost most: {name_of(3)} fp4 (4), {name_of(0)} fp4 (1)"
    assert named in " ".join(text.split())
    scores = json.loads(printed("score", problem, *things, "--base", "fp4", "--json"))
    assert [score["share"] for score in scores] == [0.5, 0.75, 0.5, 0.75, 0.5]
    assert scores[0]["quality_loss"] == 5.0 and scores[0]["snip"] == 3.0
    assert scores[1]["quality_loss"] == 9.0  # the file gives the first layer BF16
    assert scores[0]["between"] == 0.5


def test_a_matcher_that_fits_no_linear_is_named(
    problem: str, tmp_path: Path, printed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(PRECISION_FILE)
    assert main(["score", problem, str(file), "--base", "fp4"]) == 0
    assert "1 of 2 matchers fit no linear of the problem: none" in capsys.readouterr().err


def test_the_rule_of_nemotron_3_super_is_scored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = [*enumerate(PATTERN)]
    names = [f"decoder.layers.{i}.{name}" for i, kind in layers for name in KINDS[kind]]
    names += [f"mtp.layers.0.mtp_model_layer.{name}" for name in KINDS["*"] + KINDS["E"]]
    wanted = {}
    for name in names:
        number = int(name.split(".")[2])
        is_last = name.startswith("decoder") and number >= len(PATTERN) - 14
        if is_last or name.startswith("mtp") or "self_attention" in name or "latent" in name:
            wanted[name] = "bf16"
        else:
            wanted[name] = "mxfp8" if name.endswith("out_proj") else "nvfp4"
    losses = {"mxfp8": 0.25, "nvfp4": 1.0, "bf16": 0.0}
    costs = {
        option: OptionCost(quality_loss=losses[option], saving=float(option == "nvfp4"))
        for option in ("mxfp8", "nvfp4")
    }
    linears = []
    for place, name in enumerate(names):
        flops = 1.0 + place % 7
        linears.append(LinearChoices(name=name, stage=0, flops=flops, options=costs))
    problem = PlanningProblem(linears=tuple(linears), target=0.5)
    write_problem(problem, tmp_path / "problem.json")
    words = ["score", str(tmp_path / "problem.json"), str(NEMOTRON), "--base", "nvfp4", "--json"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert err == ""  # each matcher fits a linear
    (score,) = json.loads(out)
    low = sum(row.flops for row in linears if wanted[row.name] == "nvfp4")
    assert score["share"] == pytest.approx(low / sum(row.flops for row in linears))
    assert score["quality_loss"] == sum(losses[option] for option in wanted.values())
    assert score["unmeasured"] == [] and score["snip"] <= score["quality_loss"]


def test_a_picture_is_drawn(problem: str, printed: Any, tmp_path: Path) -> None:
    path = tmp_path / "recipes.svg"
    printed("score", problem, "first-last:1,1", "--output", path)
    assert path.read_text().lstrip().startswith("<?xml")


@pytest.mark.parametrize(
    ("thing", "text"),
    [
        ("last-blocks:2", "is not last-blocks:SHARE"),
        ("first-last:2", "is not first-last:N,M"),
        ("first-last:2," + "9" * 5000, "is not first-last:N,M"),
        ("first-last:1,9", "the decoder has 4 layers"),
        ("norms:high", "is not POLICY:TARGET"),
        ("norm:0.5", "unknown policy 'norm'"),
        ("norms", "policy with a target (norms:0.8)"),
        ("norms", "(did you mean 'norms:0.8'?)"),
        ("missing.json", "missing.json"),
        ("missing.yaml", "missing.yaml"),
    ],
)
def test_what_is_no_recipe_is_one_line(problem: str, refused: Any, thing: str, text: str) -> None:
    assert text in refused("score", problem, thing)


def test_a_plan_of_another_model_is_refused(problem: str, refused: Any, tmp_path: Path) -> None:
    write_plan(plan_of(["fp4"]), tmp_path / "other.json")
    assert "does not fit the model" in refused("score", problem, tmp_path / "other.json")


def test_a_diff_names_what_changed_with_its_losses_then_and_now(
    tmp_path: Path, printed: Any, refused: Any
) -> None:
    for folder in ("plans", "problems"):
        (tmp_path / folder).mkdir()
    first = plan_of(["fp4", "fp4", "fp8", "fp8"], iteration=5)
    second = plan_of(["fp4", "fp8", "fp4", "fp8"], iteration=9)
    later = problem_of([[0.0, 1.0], [0.0, 9.0], [0.0, 0.5], [0.0, 4.0]])
    for plan, problem in ((first, PROBLEM), (second, later)):
        write_plan(plan, tmp_path / "plans" / f"{plan.iteration}.json")
        write_problem(problem, tmp_path / "problems" / f"{plan.iteration}.json")
    paths = [tmp_path / "plans" / name for name in ("5.json", "9.json")]
    text = printed("diff", *paths)
    assert "2 of 4 linears changed, 50% of the FLOPs" in text
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    assert lines[name_of(1)][1:] == ["25%", "2", "0", "9", "0"]
    assert lines[name_of(2)][1:] == ["25%", "0", "3", "0", "0.5"]
    changes = json.loads(printed("diff", *paths, "--json"))
    assert [change["linear"] for change in changes] == [name_of(1), name_of(2)]
    assert changes[0]["loss_after"] == [9.0, 0.0]
    assert "every linear has the same option" in printed("diff", paths[0], paths[0])
    write_plan(plan_of(["fp4"]), tmp_path / "other.json")
    assert "are of two models" in refused("diff", paths[0], tmp_path / "other.json")


def test_an_output_never_replaces_what_is_read(problem: str, plan: str, refused: Any) -> None:
    for taken in (problem, plan):
        before = Path(taken).read_bytes()
        text = refused("score", problem, plan, "--output", taken)
        assert "which this command reads; name another file" in text
        assert Path(taken).read_bytes() == before


def test_flags_of_precision_files_need_one(problem: str, plan: str, refused: Any) -> None:
    words = ("--base", "nvfp4", "--sequential-experts", "--pipeline-stages", "7")
    text = refused("score", problem, plan, *words, "--chunk-layers", "1,2")
    assert "--base, --sequential-experts, --pipeline-stages, --chunk-layers" in text

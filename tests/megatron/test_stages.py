"""A precision file for each pipeline stage: plain Megatron gives every linear the plan's recipe.

A short run observes a layout. A plan that is as mixed as its files can hold is exported, and read
by runs without this package. The recipe of each linear is what its last forward ran in.
"""

import json
from pathlib import Path

import pytest

from megatron_snip.__main__ import main
from megatron_snip.options import Option
from megatron_snip.planning.plan import PrecisionPlan, assignment_digest, read_plan, write_plan
from megatron_snip.planning.problem import PlanningProblem, read_problem
from tests.megatron.lab import COLLECT_ONLY, CPU, MAMBA, MODEL, MTP, SCRIPT, TE, Lab

FORMATS = ["fp8", "bf16", "fp4"]
RECIPES = {"fp8": "MXFP8BlockScaling", "fp4": "NVFP4BlockScaling", "bf16": "bf16"}
JOB = ["--fp4-format", "e2m1", "--fp4-recipe", "nvfp4", "--train-iters", "4"]
"""Its default is none of the plan's first option, so that a matcher that is missing shows."""


def layout(stages: int, text: str, *flags: str) -> tuple[int, list[str]]:
    """Ranks and flags of one rank a stage."""
    words = ["--pipeline-model-parallel-size", str(stages)]
    return stages, [*words, "--pipeline-model-parallel-layout", text, *flags]


def hybrid(stages: int, pattern: str, *flags: str) -> tuple[int, list[str]]:
    words = ["--pipeline-model-parallel-size", str(stages), "--hybrid-layer-pattern", pattern]
    return stages, [*words, *MAMBA, "--mamba-head-dim", "4", *flags]


EXPERTS = ["--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "128"]
EXPERTS += ["--moe-grouped-gemm", "--moe-token-dispatcher-type", "alltoall"]
WITH_MTP = [*MTP, "--mtp-num-layers", "1"]
FIRST_AND_LAST = ["--decoder-first-pipeline-num-layers", "1"]
LAYOUTS = {
    "embedding alone": layout(2, "E|ttttL"),
    "uneven": layout(2, "Ettt|tL"),
    "first stage short": (2, ["--pipeline-model-parallel-size", "2", *FIRST_AND_LAST]),
    "empty stage": layout(3, "Et||tttL"),
    "loss alone": layout(3, "Et|ttt|L"),
    "prediction alone": layout(4, "Et|ttt|m|L", *WITH_MTP),
    "prediction at the end": layout(2, "Et|tttmL", *WITH_MTP),
    "interleaved": layout(2, "Et|t|t|tL"),
    "interleaved, uneven": layout(2, "E|tt|t|tL"),
    "interleaved, empty": layout(2, "Ett||t|tL"),
    "experts": layout(2, "Et|tttL", *EXPERTS),
    "hybrid": hybrid(2, "M|*-M"),
    "hybrid, empty": hybrid(2, "|M*-M"),
    "hybrid with prediction": hybrid(2, "M|*-M/M-", *MTP),
}


def mixed(problem: PlanningProblem) -> PrecisionPlan:
    """A plan in which neighbours differ, as far as chunks of one stage can be told apart."""
    assert problem.stage_layers is not None
    places = problem.stage_layers.local_names(problem.names)
    options: dict[tuple[int, str], str] = {}
    for place in places.values():
        options.setdefault(place, FORMATS[len(options) % len(FORMATS)])
    linears = {name: Option.parse(options[place]) for name, place in places.items()}
    return PrecisionPlan(
        iteration=0,
        policy="mixed",
        status="fixed",
        objective=None,
        bound=None,
        seconds=0.0,
        target=0.0,
        efficiency=0.0,
        stages=(0.0,) * problem.num_stages,
        stage_layers=problem.stage_layers,
        linears=linears,
        digest=assignment_digest(linears),
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_linear_runs_the_plan_s_recipe(te_lab: Lab, tmp_path: Path, name: str) -> None:
    ranks, parallel = LAYOUTS[name]
    words = [SCRIPT, *MODEL.split(), *TE, *parallel]
    output = str(tmp_path / "snip")
    observed = [*COLLECT_ONLY, "--snip-formats", "fp8,fp4", "--snip-output-dir", output]
    te_lab.run_words(ranks, ["--cpu", *words, *JOB, *observed], {}, plain=False).finished()
    problem = read_problem(tmp_path / "snip" / "problems" / "3.json")
    assert problem.stage_layers is not None
    assert problem.stage_layers.num_stages == ranks

    plan = mixed(problem)
    write_plan(plan, tmp_path / "plan.json")
    path = tmp_path / "precision.yaml"
    export = ["export", str(tmp_path / "plan.json"), "--capability", "10.0", "--output", str(path)]
    assert main(export) == 0
    files = sorted(map(str, tmp_path.glob("precision*.yaml")))
    assert len(files) in (1, ranks)
    back = ["--problem", str(tmp_path / "snip" / "problems" / "3.json"), "--base", "nvfp4"]
    assert main(["import", *files, *back, "--output", str(tmp_path / "back.json")]) == 0
    spelled = {"fp8": "mxfp8", "fp4": "nvfp4", "bf16": "bf16"}
    wanted = {name: spelled[str(option)] for name, option in plan.linears.items()}
    imported = read_plan(tmp_path / "back.json")
    assert {name: str(option) for name, option in imported.linears.items()} == wanted

    by_stage = tmp_path / "by_stage.py"
    by_stage.write_text(
        "import json, os, runpy, sys\n"
        f"files = {json.dumps(files)}\n"
        "file = files[int(os.environ['RANK']) % len(files)]\n"
        "sys.argv = [*sys.argv[1:], '--te-precision-config-file', file]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    words = [str(by_stage), SCRIPT, *CPU.split(), *words[1:], *JOB]
    results = te_lab.run_words(ranks, words, {}, plain=True).finished()
    ran = {name: recipe for rank in results for name, recipe in rank["recipes"].items()}
    assert {name: ran[name] for name in plan.linears} == {
        name: RECIPES[str(option)] for name, option in plan.linears.items()
    }

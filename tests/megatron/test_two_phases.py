"""Measure first, train later: a short job, a plan, a long job without SNIP.

The commands are those of docs/two-phases.md.
"""

import re
from pathlib import Path

import pytest

from megatron_snip.__main__ import main
from megatron_snip.planning.plan import read_plan
from tests.megatron import lab as settings
from tests.megatron.lab import COLLECT_ONLY, PP2, SCRIPT, SNIP, TE, Lab, logged
from tests.processes import ROOT
from tests.unit.docs.shown_commands import commands_in

PAGE = ROOT / "docs" / "two-phases.md"
LAYOUT = "one hybrid"
"""Megatron 0.19 passes names to the linears of hybrid models alone, and stores weights by them."""
SHORT = ["--train-iters", "4", "--cuda-graph-warmup-steps", "1"]
# The norm of all gradients is added up in the order of buckets, and stored weights have others.
SHORT += ["--clip-grad", "0"]
MODEL = ["--mamba-head-dim", "4"]
"""All sizes are multiples of 32, as MXFP8 needs them."""
FORMATS = ["--snip-formats", "bf16,fp8"]
STORED = ("--fp8-param-gather", "--reuse-grad-buf-for-mxfp8-param-ag")


def shown(*having: str) -> list[str]:
    """Return the words of the page's only command that has these words."""
    commands = [each.words for each in commands_in(PAGE.read_text(), PAGE.name)]
    (found,) = [words for words in commands if set(having) <= set(words)]
    return found


FLAGS = shown("torchrun", "runs/stored.yaml")
FLAGS = FLAGS[FLAGS.index("$MY_ARGUMENTS") + 1 :]
"""Of the long job."""
FILE = FLAGS.index("--te-precision-config-file")
PROBLEM = "checkpoints/measured/snip/problems/1500.json"
JOB = [word for word in FLAGS[:FILE] + FLAGS[FILE + 2 :] if word not in STORED]
"""The long job with BF16 weights and without a plan."""
BY_STAGE = re.search(r"^```python\n(# by_stage\.py\n.*?)^```", PAGE.read_text(), re.M | re.S)
"""The script that gives each rank the file of its pipeline stage."""


@pytest.fixture(scope="module")
def files(te_lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What the commands read and write, by their names on the page; and the file imported again."""
    folder = tmp_path_factory.mktemp("static")
    measured = te_lab.run(LAYOUT, [*MODEL, *JOB, *SHORT, *COLLECT_ONLY, *FORMATS])
    measured.finished()
    paths = {
        PROBLEM: measured.output / "problems" / "3.json",
        "runs/mxfp8.json": folder / "mxfp8.json",
        "runs/stored.yaml": folder / "stored.yaml",
        "imported": folder / "imported.json",
    }
    for having in (("plan", "runs/mxfp8.json"), ("export", "runs/stored.yaml")):
        assert main([str(paths.get(word, word)) for word in shown(*having)[1:]]) == 0
    words = ["import", "runs/stored.yaml", "--problem", PROBLEM]
    words += ["--output", "imported"]
    assert main([str(paths.get(word, word)) for word in words]) == 0
    return paths


def test_the_long_job_trains_as_under_snip_and_stores_what_the_file_says(
    te_lab: Lab, files: dict[str, Path]
) -> None:
    words = [str(files.get(word, word)) for word in FLAGS]
    static = te_lab.run(LAYOUT, [*MODEL, *words, *SHORT], plain=True)
    planned = [*SNIP, "--snip-formats", "bf16,mxfp8", "--snip-plan-file", str(files["imported"])]
    under_snip = te_lab.run(LAYOUT, [*MODEL, *JOB, *SHORT, *planned])
    assert logged(static) == logged(under_snip)
    assert len(logged(static)) == 4
    plan = read_plan(files["runs/mxfp8.json"])
    options = {name: str(option) for name, option in plan.linears.items()}
    assert set(options.values()) == {"bf16", "fp8"}
    (result,) = static.finished()
    stored = {name.removesuffix(".weight") for name in result["quantized"]}
    assert stored == {name for name, option in options.items() if option == "fp8"}


def test_each_rank_of_a_pipeline_reads_the_file_of_its_stage(te_lab: Lab, tmp_path: Path) -> None:
    job = [*TE, *SHORT, "--fp8-format", "e4m3", "--fp8-recipe", "mxfp8"]
    measured = te_lab.run("pp2", [*job, *COLLECT_ONLY, *FORMATS])
    measured.finished()
    problem = measured.output / "problems" / "3.json"
    plan = tmp_path / "static.json"
    output = tmp_path / "precision.yaml"
    assert main(["plan", str(problem), "--target", "0.75", "--output", str(plan)]) == 0
    words = ["export", str(plan), "--capability", "10.0", "--fp8-recipe", "mxfp8"]
    assert main([*words, "--output", str(output)]) == 0
    stages = [path.read_text() for path in sorted(tmp_path.glob("precision.stage*.yaml"))]
    assert len(set(stages)) == 2

    assert BY_STAGE is not None
    script = tmp_path / "by_stage.py"
    script.write_text(BY_STAGE[1].replace("runs/", f"{tmp_path}/"))
    words = [str(script), SCRIPT, *settings.CPU.split(), *settings.MODEL.split(), *PP2, *job]
    static = te_lab.run_words(2, words, {}, plain=True)
    static.finished()
    under_snip = te_lab.run("pp2", [*job, *SNIP, *FORMATS, "--snip-plan-file", str(plan)])
    assert logged(static) == logged(under_snip)
    assert len(logged(static)) == 4
    # Both stages with one file train something else.
    (tmp_path / "precision.stage1.yaml").write_text(stages[0])
    assert logged(te_lab.run_words(2, words, {}, plain=True)) != logged(static)

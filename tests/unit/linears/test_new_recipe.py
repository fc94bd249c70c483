"""Recipes that are added to the table reach everything that uses the table.

They are added in a process of its own, before the command line's modules read the table.
"""

from pathlib import Path

from megatron_snip.planning.plan import write_plan
from megatron_snip.planning.problem import write_problem
from tests.processes import run_python
from tests.unit.planning.build import plan_of, problem_of

SCRIPT = """
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from megatron_snip.formats import FORMATS
from megatron_snip.linears.te.recipe_table import RECIPES, GemmRecipe, JobPrecision, RecipeVariable

FORMATS["fp8_new"] = replace(FORMATS["mxfp8"], name="fp8_new", tile=64)
RECIPES["new"] = replace(
    RECIPES["mxfp8"],
    text="1x64 tiles",
    formats=("fp8", "fp8_new"),
    quantization=FORMATS["fp8_new"],
    precision=JobPrecision("fp8", "e3m4", "new"),
    gpus=("11.0",),
    converter="newfloat",
    modelopt={"quant_algo": "NEW"},
    token_multiple=64,
    variables=(
        RecipeVariable("NVTE_NEW_ROWS", ("1",), "rows", changes={"weight_block": (1, 64)}),
        RecipeVariable("NVTE_NEW_OTHER", ("1",), "other rows"),
    ),
)

# A second FP4 recipe, of a format that exists.
RECIPES["mxfp4"] = GemmRecipe(
    text="1x32 tiles, power-of-two scales",
    formats=("fp4", "mxfp4"),
    quantization=FORMATS["mxfp4"],
    precision=JobPrecision("fp4", "e2m1", "mxfp4"),
    recipe_class="MXFP4BlockScaling",
    gemms="MXFP4 GEMMs",
    gpus=("10.x", "11.0"),
    check="is_mxfp4_available",
    converter="mxfp4",
    modelopt={"quant_algo": "MXFP4"},
    dim_multiple=32,
    token_multiple=32,
)

from megatron_snip.__main__ import main
from megatron_snip.cli import machine as shown
from megatron_snip.linears.auto_formats import te_formats
from megatron_snip.linears.te import quantizers
from megatron_snip.linears.te.machine import (
    Machine, measured_format, te_recipe, te_support, unmeasured_variables
)
from megatron_snip.linears.te.refusals import gather_refusal, padded_tokens, te_refusal
from megatron_snip.options import Option
from megatron_snip.output import console
from megatron_snip.planning.plan import read_plan

machine = Machine((11, 0), "2.20.2")
assert te_support("fp8", machine) == (
    "new", "new recipe: 1x64 tiles, rows (NVTE_NEW_ROWS), other rows (NVTE_NEW_OTHER)"
)
assert te_formats(machine) == ("bf16", "fp8", "fp4")
assert measured_format("fp8", "te", machine) == replace(
    FORMATS["fp8_new"], weight_block=(1, 64)
)
assert "the statistics of new are those without it" in unmeasured_variables(["fp8"], machine)[0]
hopper = Machine((9, 0), "2.20.2", job=RECIPES["new"].precision)
assert te_recipe(Option.uniform("fp8"), hopper).fprop == "new"
assert te_refusal(Option.uniform("mxfp8"), machine) is not None
assert quantizers.new_bf16_new.__name__ == "new_bf16_new"
job = dict(fp8="e3m4", fp8_recipe="new", fp4=None)
assert padded_tokens(SimpleNamespace(**job)) == 64

assert te_support("fp4", machine)[0] == te_support("mxfp4", machine)[0] == "mxfp4"
assert measured_format("fp4", "te", machine) == FORMATS["mxfp4"]
for name in ("nvfp4", "mxfp4"):
    blackwell = Machine((10, 0), "2.20.2", job=RECIPES[name].precision)
    option = Option.parse("mxfp4-fp4-nvfp4")
    assert te_recipe(option, blackwell) == ("mxfp4", name, "nvfp4")
assert te_recipe(option, Machine((10, 0), "2.20.2")).dgrad == "nvfp4"  # the first of the table
assert quantizers.mxfp4_nvfp4_bf16.__name__ == "mxfp4_nvfp4_bf16"
assert padded_tokens(SimpleNamespace(fp8=None, fp4="e2m1", fp4_recipe="mxfp4")) == 32
gathering = SimpleNamespace(sequence_parallel=True, parallel_mode="column")
refused = []
for text in ("fp8-fp8-mxfp4", "mxfp8-mxfp4-nvfp4", "mxfp4-nvfp4-fp8", "mxfp4-mxfp4-fp8"):
    option = Option.parse(text)
    if gather_refusal(gathering, option, te_recipe(option, blackwell)) is not None:
        refused.append(text)
# Columns of NVFP4 alone cannot be dequantized; of another recipe of FP4 they can.
assert refused == ["mxfp8-mxfp4-nvfp4", "mxfp4-nvfp4-fp8"], refused

shown.this_machine = lambda with_te: machine
shown.show(console())

run = ["--fp8-recipe", "new", "--fp8-format", "e3m4", "--capability", "9.0"]
assert main(["export", "plan.json", "--output", "out.yaml", *run]) == 0
back = ["--problem", "problem.json", "--output", "back.json"]
assert main(["import", "out.yaml", *back]) == 0
linears = read_plan(Path("back.json")).linears
names = [str(option) for option in linears.values()]
assert names == ["fp8_new", "bf16", "fp8_new-bf16-bf16", "fp8_new"], names
assert main(["export", "back.json", "--to", "modelopt", "--output", "serve.json"]) == 0
assert '"quant_algo": "NEW"' in Path("serve.json").read_text()
words = ["--to", "torchtitan", "--output", "filters.json", "--nearest"]
assert main(["export", "back.json", *words]) == 0
assert "newfloat" in json.loads(Path("filters.json").read_text())

run = ["--fp4-recipe", "mxfp4", "--capability", "10.0"]
assert main(["export", "fp4.json", "--output", "fp4.yaml", *run]) == 0
assert "{fp4_quantization_recipe: mxfp4, override" in Path("fp4.yaml").read_text()
assert main(["import", "fp4.yaml", *back]) == 0
names = [str(option) for option in read_plan(Path("back.json")).linears.values()]
assert names == ["mxfp4", "bf16", "nvfp4", "mxfp4-bf16-bf16"], names
assert main(["export", "back.json", "--to", "modelopt", "--output", "serve.json"]) == 0
assert '"quant_algo": "MXFP4"' in Path("serve.json").read_text()
"""


def test_a_recipe_is_one_entry_of_one_table(tmp_path: Path) -> None:
    plan = plan_of(["fp8", "bf16", "fp8-bf16-bf16", "fp8"])
    write_plan(plan, tmp_path / "plan.json")
    write_plan(plan_of(["fp4", "bf16", "nvfp4", "fp4-bf16-bf16"]), tmp_path / "fp4.json")
    write_problem(problem_of([[0.0, 1.0]] * 4), tmp_path / "problem.json")
    settings = {"NVTE_NEW_ROWS": "1", "NVTE_NEW_OTHER": "1", "COLUMNS": "400"}
    done = run_python("-c", SCRIPT, cwd=tmp_path, timeout=600, **settings)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "--fp8-format e3m4 --fp8-recipe new" in done.stdout
    assert "--fp4-format e2m1 --fp4-recipe mxfp4" in done.stdout
    assert "the job's own new recipe: 1x64 tiles" in " ".join(done.stdout.split())

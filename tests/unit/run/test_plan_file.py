"""A run that is given a plan file."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_snip.options import Option
from megatron_snip.planning.plan import write_plan
from megatron_snip.run.plan_file import recipe_changes
from tests.unit.planning.build import plan_of


def test_a_plan_file_from_another_recipe_says_what_changes(tmp_path: Path) -> None:
    """The run that made it wrote what its linears ran; other plans' files do not count."""
    plan = plan_of(["fp8", "bf16", "fp8"])
    (tmp_path / "plans").mkdir()
    (tmp_path / "precision").mkdir()
    file = tmp_path / "plans" / "200.json"
    write_plan(plan, file)
    model: Any = SimpleNamespace(
        linears=[
            SimpleNamespace(option=Option.uniform("fp8"), recipe="tensorwise_hybrid"),
            SimpleNamespace(option=Option.uniform("bf16"), recipe="bf16"),
        ]
    )
    assert recipe_changes(file, plan.digest, model) == []
    rows = [{"option": "fp8", "recipe": "blockwise"}, {"option": "bf16", "recipe": "bf16"}]
    for name, digest in (("1", "other"), ("202", plan.digest)):
        table = {"plan_digest": digest, "linears": rows if name == "202" else []}
        (tmp_path / "precision" / f"{name}.json").write_text(json.dumps(table))
    (tmp_path / "precision" / "0.json").write_text("{")
    (line,) = recipe_changes(file, plan.digest, model)
    assert line == f"fp8 was blockwise in the run of '{file}', and is tensorwise_hybrid here"

"""What every linear resolved to: rows, text, JSON."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron_snip.reporting.reporter import FileReporter, NullReporter, Reporters, tell_precision

from megatron_snip.linears.backends import Backend
from megatron_snip.linears.model import PlannedModel
from megatron_snip.linears.precision_log import LinearPrecision, precision_table
from megatron_snip.options import Option
from megatron_snip.reporting.run_directory import RunDirectory
from megatron_snip.topology import Topology
from tests.unit.linears.conftest import MakeModel
from tests.unit.planning.build import name_of, plan_of


class Stored(torch.Tensor):
    """As Transformer Engine's tensors that are stored quantized."""


def linear(layer: int, option: str, recipe: str, weight: Any = None) -> Any:
    return SimpleNamespace(
        placement=SimpleNamespace(name=name_of(layer)),
        option=Option.parse(option),
        recipe=recipe,
        backend=Backend.TE,
        weight=torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
        if weight is None
        else weight,
    )


def test_rows_follow_the_plan_and_hold_what_runs() -> None:
    plan = plan_of(["fp8", "fp4", "fp4-fp8-bf16"])
    linears = [linear(2, "fp4-fp8-bf16", "custom(nvfp4, mxfp8, bf16)"), linear(0, "fp8", "mxfp8")]
    table = precision_table([*linears, linear(1, "fp4", "nvfp4")], plan, 7, None)
    assert (table.step, table.plan_step, table.plan_digest) == (7, plan.step, plan.digest)
    assert table.linears == (
        LinearPrecision(name_of(0), "fp8", "mxfp8", "te", "bfloat16"),
        LinearPrecision(name_of(1), "fp4", "nvfp4", "te", "bfloat16"),
        LinearPrecision(name_of(2), "fp4-fp8-bf16", "custom(nvfp4, mxfp8, bf16)", "te", "bfloat16"),
    )


def test_what_differs_between_ranks_or_experts_is_not_hidden() -> None:
    plan = plan_of(["fp8"])
    stored = SimpleNamespace(data=torch.zeros(1).as_subclass(Stored), dtype=torch.bfloat16)
    experts = [linear(0, "fp8", "mxfp8"), linear(0, "fp8", "mxfp8"), linear(0, "fp8", "x", stored)]
    (row,) = precision_table(experts, plan, 0, None).linears
    assert (row.option, row.recipe, row.backend) == ("fp8", "mxfp8 / x", "te")
    assert row.weight_storage == "bfloat16 / Stored"


def test_people_read_a_table() -> None:
    plan = plan_of(["fp8", "fp4"])
    table = precision_table([linear(0, "fp8", "mxfp8"), linear(1, "fp4", "nvfp4")], plan, 3, None)
    title, head, *rows = table.text().splitlines()
    assert title.startswith("precision from step 3 on (plan of step 0, digest ")
    assert head.split()[:4] == ["linear", "option", "recipe", "backend"]
    assert [row.split() for row in rows] == [
        [name_of(0), "fp8", "mxfp8", "te", "bfloat16"],
        [name_of(1), "fp4", "nvfp4", "te", "bfloat16"],
    ]
    starts = {row.index("te") for row in rows} | {head.index("backend")}
    assert len(starts) == 1  # columns line up


def test_megatrons_own_linears(make_model: MakeModel) -> None:
    model = PlannedModel([make_model()], Topology(), seed=0)
    names = [info.name for info in model.all_linears]
    plan = plan_of({name: "fp4" if name.endswith("fc1") else "bf16" for name in names})
    model.apply(plan.linears)
    table = precision_table(model.linears, plan, 0, None)
    assert [row.name for row in table.linears] == names
    for row in table.linears:
        fc1 = row.name.endswith("fc1")
        assert (row.option, row.recipe) == (("fp4", "simulated") if fc1 else ("bf16", "megatron"))
        assert (row.backend, row.weight_storage) == ("simulate", "float32")


def test_files_hold_the_same(tmp_path: Path) -> None:
    plan = plan_of(["fp8"])
    table = precision_table([linear(0, "fp8", "mxfp8")], plan, 9, None)
    reporter = Reporters([NullReporter(), FileReporter(RunDirectory(tmp_path))])
    tell_precision(reporter, table.step, table.to_dict())
    tell_precision(NullReporter(), table.step, table.to_dict())
    assert json.loads((tmp_path / "precision" / "9.json").read_text()) == {
        "version": 1,
        "step": 9,
        "plan_step": 0,
        "plan_digest": plan.digest,
        "linears": [
            {
                "name": name_of(0),
                "option": "fp8",
                "recipe": "mxfp8",
                "backend": "te",
                "weight_storage": "bfloat16",
            }
        ],
    }

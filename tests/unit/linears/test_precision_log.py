"""What every linear resolved to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from megatron_snip.linears.model import PlannedModel
from megatron_snip.linears.precision_log import precision_table
from megatron_snip.options import Option
from megatron_snip.topology import Topology
from tests.unit.linears.conftest import MakeModel
from tests.unit.planning.build import name_of, plan_of


class Stored(torch.Tensor):
    """As Transformer Engine's tensors that are stored quantized."""


def linear(layer: int, option: str, recipe: str, weight: Any = None) -> Any:
    weight = torch.nn.Parameter(torch.zeros(1).bfloat16()) if weight is None else weight
    return SimpleNamespace(
        name=name_of(layer),
        option=Option.parse(option),
        recipe=recipe,
        backend="te",
        weights=(weight,),
    )


def test_rows_follow_the_plan() -> None:
    plan = plan_of(["fp8", "fp4-fp8-bf16"])
    mixed = "custom(nvfp4, mxfp8, bf16)"
    linears = [linear(1, "fp4-fp8-bf16", mixed), linear(0, "fp8", "mxfp8")]
    table = precision_table(linears, plan, 7, None)
    columns = ("name", "option", "recipe", "backend", "weight_storage")
    rows = [
        (name_of(0), "fp8", "mxfp8", "te", "bfloat16"),
        (name_of(1), "fp4-fp8-bf16", mixed, "te", "bfloat16"),
    ]
    assert table == {
        "version": 2,
        "iteration": 7,
        "plan_iteration": plan.iteration,
        "plan_digest": plan.digest,
        "linears": [dict(zip(columns, row, strict=True)) for row in rows],
    }


def test_differences_between_ranks_or_experts_are_shown() -> None:
    stored = SimpleNamespace(data=torch.zeros(1).as_subclass(Stored), dtype=torch.bfloat16)
    experts = [linear(0, "fp8", "mxfp8"), linear(0, "fp8", "mxfp8"), linear(0, "fp8", "x", stored)]
    (row,) = precision_table(experts, plan_of(["fp8"]), 0, None)["linears"]
    assert (row["option"], row["recipe"], row["backend"]) == ("fp8", "mxfp8 / x", "te")
    assert row["weight_storage"] == "bfloat16 / Stored"


def test_megatron_s_own_linears(make_model: MakeModel) -> None:
    model = PlannedModel([make_model()], Topology(), seed=0)
    names = [info.name for info in model.all_linears]
    plan = plan_of({name: "fp4" if name.endswith("fc1") else "bf16" for name in names})
    model.apply(plan.linears)
    table = precision_table(model.linears, plan, 0, None)
    assert [row["name"] for row in table["linears"]] == names
    for row in table["linears"]:
        expected = ("fp4", "simulated") if row["name"].endswith("fc1") else ("bf16", "megatron")
        assert (row["option"], row["recipe"]) == expected
        assert (row["backend"], row["weight_storage"]) == ("simulate", "float32")

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


def linear(recipe: str, weight: torch.Tensor) -> Any:
    fp8 = Option.uniform("fp8")
    named = SimpleNamespace(data=weight, dtype=torch.bfloat16)
    return SimpleNamespace(
        name=name_of(0), option=fp8, recipe=recipe, backend="te", weights=(named,)
    )


def test_differences_between_ranks_or_experts_are_shown() -> None:
    plain = torch.zeros(1)
    experts = [*[linear("mxfp8", plain)] * 2, linear("x", plain.as_subclass(Stored))]
    (row,) = precision_table(experts, plan_of(["fp8"]), 0, None)["linears"]
    assert (row["option"], row["recipe"], row["backend"]) == ("fp8", "mxfp8 / x", "te")
    assert row["weight_storage"] == "bfloat16 / Stored"


def test_rows_follow_the_plan(make_model: MakeModel) -> None:
    model = PlannedModel([make_model()], Topology(), seed=0)
    names = [info.name for info in model.all_linears]
    plan = plan_of({name: "fp4" if name.endswith("fc1") else "bf16" for name in names})
    model.apply(plan.linears)
    table = precision_table(model.linears[::-1], plan, 7, None)
    rows = table.pop("linears")
    header = {"version": 2, "iteration": 7, "plan_iteration": 0, "plan_digest": plan.digest}
    assert table == header and [row["name"] for row in rows] == names
    for row in rows:
        expected = ("fp4", "simulated") if row["name"].endswith("fc1") else ("bf16", "megatron")
        assert (row["option"], row["recipe"]) == expected
        assert (row["backend"], row["weight_storage"]) == ("simulate", "float32")

"""All linears of a model together."""

from __future__ import annotations

import pytest
import torch

from megatron_snip.errors import UnsupportedError
from megatron_snip.linears.model import PlannedModel
from megatron_snip.options import BF16, Option
from megatron_snip.topology import Topology
from tests.unit.linears.conftest import MakeModel

FP8 = Option.uniform("fp8")


def overridden(model: PlannedModel) -> list[bool]:
    return ["_forward_impl" in linear.module.__dict__ for linear in model.linears]


def test_installing_applying_and_removing(make_model: MakeModel) -> None:
    built = make_model()
    state = list(built.state_dict())
    model = PlannedModel([built], Topology(), seed=3)
    assert len(model.linears) == len(model.all_linears) == 8
    assert overridden(model) == [False] * 8
    model.install()
    model.install()
    assert overridden(model) == [True] * 8 and list(built.state_dict()) == state
    plan = {info.name: FP8 if "fc1" in info.name else BF16 for info in model.all_linears}
    model.apply(plan)
    assert {p.name for p in model.linears if p.option == FP8} == {
        name for name, option in plan.items() if option == FP8
    }
    with pytest.raises(KeyError):
        model.apply(dict(list(plan.items())[1:]))
    model.uninstall()
    model.uninstall()
    assert overridden(model) == [False] * 8


def test_weights_are_the_trained_ones_of_the_names(make_model: MakeModel) -> None:
    model = PlannedModel([make_model()], Topology(), seed=0)
    frozen = model.linears[2]
    frozen.module.weight.requires_grad_(False)  # type: ignore[union-attr]
    instances = [linear.placements[0].instance for linear in model.linears]
    assert list(model.weights()) == [i for i in instances if i != frozen.placements[0].instance]
    name = model.linears[0].name
    assert list(model.weights(frozenset({name}))) == [name]


def test_a_model_without_linears_is_refused() -> None:
    with pytest.raises(UnsupportedError):
        PlannedModel([torch.nn.Linear(2, 2)], Topology(), seed=0)

"""What torch's AdamW needs when a distributed optimizer of it is saved and loaded."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.optimizer import distrib_optimizer

from megatron_snip.patches.cpu import torch_adam


class Distributed:
    """As much of Megatron's DistributedOptimizer as the wrappers look at."""

    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.optimizer = torch.optim.AdamW([self.weight], lr=0.1)
        self.model_param_group_index_map = {"weight": (0, 0)}

    def state_dict(self) -> Any:
        return {"steps": [float(s["step"]) for s in self.optimizer.state.values()]}

    def load_state_dict(self, state_dict: Any) -> None:
        # Megatron gives one tensor to all, or leaves it at 0.
        for state in self.optimizer.state.values():
            state["step"] = torch.tensor(0.0)

    def _set_main_param_and_optimizer_states(self, model_param: Any, tensors: Any) -> None:
        targets = {"param": self.weight.data, **self.optimizer.state[self.weight]}
        for key in targets:
            targets[key].copy_(tensors[key])


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Distributed]:
    monkeypatch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", False)
    monkeypatch.setattr(distrib_optimizer, "DistributedOptimizer", Distributed)
    for name in ("state_dict", "load_state_dict", "_set_main_param_and_optimizer_states"):
        monkeypatch.setattr(Distributed, name, getattr(Distributed, name))
    torch_adam.install()
    torch_adam.install()  # changes nothing
    yield Distributed()
    delattr(Distributed, torch_adam._MARK)


def adamw(steps: int) -> torch.optim.AdamW:
    torch.manual_seed(1)
    parameters = [torch.nn.Parameter(torch.randn(3)) for _ in range(2)]
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    for _ in range(steps):
        step(optimizer)
    return optimizer


def step(optimizer: torch.optim.AdamW) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = parameter.detach().sin()
    optimizer.step()


def test_state_made_before_the_first_step_is_what_the_first_step_makes() -> None:
    plain, early = adamw(0), adamw(0)
    torch_adam._state_dict_before_first_step(lambda self: None)(SimpleNamespace(optimizer=early))
    assert len(early.state) == 2
    step(plain)
    step(early)
    for a, b in zip(plain.param_groups[0]["params"], early.param_groups[0]["params"], strict=True):
        assert torch.equal(a, b)
        assert plain.state[a]["step"] == early.state[b]["step"] == 1


def test_a_loaded_step_count_belongs_to_each_parameter() -> None:
    optimizer = adamw(3)

    def upstream(self: Any, state_dict: Any) -> None:
        shared = torch.tensor(0.0)  # one tensor for all, and the wrong count
        for state in self.optimizer.state.values():
            state["step"] = shared

    loaded = {"optimizer": {"param_groups": [{"step": 3.0}]}}
    torch_adam._load_with_own_steps(upstream)(SimpleNamespace(optimizer=optimizer), loaded)
    step(optimizer)
    assert [s["step"].item() for s in optimizer.state.values()] == [4.0, 4.0]


def test_tensors_without_a_step_leave_the_step_alone(patched: Distributed) -> None:
    patched.state_dict()
    patched.load_state_dict({"optimizer": {"param_groups": [{"step": 7}]}})
    tensors = {"param": torch.zeros(3), "exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)}
    patched._set_main_param_and_optimizer_states("weight", tensors)
    assert patched.state_dict() == {"steps": [7.0]}
    assert torch.equal(patched.weight.data, torch.zeros(3))


def test_nothing_is_wrapped_beside_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", True)
    assert torch_adam.wrappers() == {}

"""Quantized weights are cached from a step's first use to its optimizer step."""

from collections.abc import Callable

import pytest
import torch

from megatron_snip.linears.runtime import QuantizedWeightCache


class Used:
    """A cache of one weight's quantized form; counts how often it is made."""

    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.ones(4, 4))
        self.cache, self.made = QuantizedWeightCache(), 0
        self.cache.open()

    def get(self) -> torch.Tensor:
        return self.cache.get("linear", self.weight, self._make)

    def _make(self) -> torch.Tensor:
        self.made += 1
        return self.weight.detach().clone()


def adamw_on_a_copy(weight: torch.nn.Parameter) -> None:
    """As Megatron does: the optimizer steps on FP32 copies, `.data` takes them."""
    main = weight.detach().clone().requires_grad_()
    main.grad = torch.ones_like(main)
    torch.optim.AdamW([main], lr=1.0).step()
    weight.data.copy_(main.detach())


def in_place(weight: torch.nn.Parameter) -> None:
    with torch.no_grad():
        weight.copy_(torch.zeros(4, 4))


def load(weight: torch.nn.Parameter) -> None:
    module = torch.nn.Linear(4, 4, bias=False)
    module.weight = weight
    module.load_state_dict({"weight": torch.full((4, 4), 7.0)})


def other_memory(weight: torch.nn.Parameter) -> None:
    weight.data = torch.full((4, 4), 3.0)


@pytest.mark.parametrize("change", [adamw_on_a_copy, in_place, load, other_memory])
def test_a_changed_weight_is_quantized_again(change: Callable[[torch.nn.Parameter], None]) -> None:
    used = Used()
    used.get()
    change(used.weight)
    assert torch.equal(used.get(), used.weight)
    assert used.made == 2


def test_an_optimizer_step_frees_the_memory_before_it_works() -> None:
    used, seen = Used(), []
    used.get()

    class Watching(torch.optim.SGD):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            seen.append(used.cache.nbytes)

    Watching([used.weight], lr=1.0).step()
    used.get()
    used.get()
    assert seen == [0] and used.made == 3 and used.cache.nbytes == 0

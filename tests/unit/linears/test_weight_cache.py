"""Quantized weights are cached from a step's first use to its optimizer step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatron_snip.linears.weight_cache import QuantizedWeightCache


class Used:
    """A cache of one weight's quantized form; counts how often it is made."""

    def __init__(self, opened: bool = True) -> None:
        self.weight = torch.nn.Parameter(torch.ones(4, 4))
        self.cache, self.made = QuantizedWeightCache(), 0
        if opened:
            self.cache.open()

    def get(self, form: str = "fp8") -> torch.Tensor:
        return self.cache.get(("linear", form), self.weight, self._make)

    def _make(self) -> torch.Tensor:
        self.made += 1
        return self.weight.detach().clone()


def test_microbatches_share_an_entry_and_passes_do_not() -> None:
    used = Used(opened=False)
    for _ in range(2):
        used.get()  # nothing is cached before a pass
    assert used.made == 2 and used.cache.nbytes == 0
    for step in range(2):
        used.cache.open()
        for _ in range(3):
            used.get()
        assert used.made == 3 + step
    used.get("fp4")
    assert used.made == 5 and used.cache.nbytes == 2 * 64
    used.cache.close()
    assert used.cache.nbytes == 0


def sgd(weight: torch.nn.Parameter) -> None:
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.ones_like(weight)
    optimizer.step()


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


@pytest.mark.parametrize("change", [sgd, adamw_on_a_copy, in_place, load, other_memory])
def test_a_changed_weight_is_quantized_again(
    change: Callable[[torch.nn.Parameter], None],
) -> None:
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

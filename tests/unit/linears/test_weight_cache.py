"""Quantized weights are cached from a step's first use to its optimizer step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatron_snip.linears.weight_cache import QuantizedWeightCache


class Counter:
    """Makes a copy of a weight and counts how often."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.made = 0

    def __call__(self) -> torch.Tensor:
        self.made += 1
        return self.weight.detach().clone()


def cache() -> tuple[QuantizedWeightCache, torch.nn.Parameter, Counter]:
    weight = torch.nn.Parameter(torch.ones(4, 4))
    return QuantizedWeightCache(), weight, Counter(weight)


def use(
    found: QuantizedWeightCache, weight: torch.Tensor, make: Counter, form: str = "fp8"
) -> torch.Tensor:
    return found.get(("linear", form), weight, make)


def test_nothing_is_cached_before_a_pass() -> None:
    found, weight, make = cache()
    use(found, weight, make)
    use(found, weight, make)
    assert make.made == 2 and found.nbytes == 0


def test_microbatches_share_an_entry_and_passes_do_not() -> None:
    found, weight, make = cache()
    for step in range(2):
        found.open()
        for _ in range(3):
            use(found, weight, make)
        assert make.made == step + 1
    use(found, weight, make, form="fp4")
    assert make.made == 3
    assert found.nbytes == 2 * 64


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
    found, weight, make = cache()
    found.open()
    use(found, weight, make)
    change(weight)
    assert torch.equal(use(found, weight, make), weight)
    assert make.made == 2


def test_an_optimizer_step_frees_the_memory_before_it_works() -> None:
    found, weight, make = cache()
    found.open()
    use(found, weight, make)
    seen = []

    class Watching(torch.optim.SGD):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            seen.append(found.nbytes)

    Watching([weight], lr=1.0).step()
    assert seen == [0]
    use(found, weight, make)
    use(found, weight, make)
    assert make.made == 3 and found.nbytes == 0


def test_closing_empties_the_cache() -> None:
    found, weight, make = cache()
    found.open()
    use(found, weight, make)
    found.close()
    assert found.nbytes == 0

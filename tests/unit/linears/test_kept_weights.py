"""Quantized weights live from a step's first use to its optimizer step, and no longer."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from megatron_snip.linears.kept_weights import KeptWeights


class Counter:
    """Makes a copy of a weight and counts how often."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.made = 0

    def __call__(self) -> torch.Tensor:
        self.made += 1
        return self.weight.detach().clone()


def kept() -> tuple[KeptWeights, torch.nn.Parameter, Counter]:
    weight = torch.nn.Parameter(torch.ones(4, 4))
    return KeptWeights(), weight, Counter(weight)


def use(store: KeptWeights, weight: torch.Tensor, make: Counter, form: str = "fp8") -> torch.Tensor:
    return store.get("linear", form, weight, make)


def test_nothing_is_kept_before_a_pass() -> None:
    store, weight, make = kept()
    use(store, weight, make)
    use(store, weight, make)
    assert make.made == 2 and store.nbytes == 0


def test_microbatches_share_and_passes_do_not() -> None:
    store, weight, make = kept()
    for step in range(2):
        store.open()
        for _ in range(3):
            use(store, weight, make)
        assert make.made == step + 1
    use(store, weight, make, form="fp4")
    assert make.made == 3
    assert store.nbytes == 2 * 64


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


def elsewhere(weight: torch.nn.Parameter) -> None:
    weight.data = torch.full((4, 4), 3.0)


@pytest.mark.parametrize("change", [sgd, adamw_on_a_copy, in_place, load, elsewhere])
def test_a_changed_weight_is_quantized_anew(
    change: Callable[[torch.nn.Parameter], None],
) -> None:
    store, weight, make = kept()
    store.open()
    use(store, weight, make)
    change(weight)
    assert torch.equal(use(store, weight, make), weight)
    assert make.made == 2


def test_an_optimizer_step_frees_the_memory_before_it_works() -> None:
    store, weight, make = kept()
    store.open()
    use(store, weight, make)
    seen = []

    class Watching(torch.optim.SGD):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            seen.append(store.nbytes)

    Watching([weight], lr=1.0).step()
    assert seen == [0]
    use(store, weight, make)
    use(store, weight, make)
    assert make.made == 3 and store.nbytes == 0


def test_closing_forgets() -> None:
    store, weight, make = kept()
    store.open()
    use(store, weight, make)
    store.close()
    assert store.nbytes == 0


def test_owners_do_not_share() -> None:
    store, weight, make = kept()
    store.open()
    store.get("a", "fp8", weight, make)
    store.get("b", "fp8", weight, make)
    assert make.made == 2


def test_a_dropped_store_is_not_kept_alive() -> None:
    from megatron_snip.linears import kept_weights

    gc.collect()
    before = len(kept_weights._STORES)
    store = KeptWeights()
    assert len(kept_weights._STORES) == before + 1
    del store
    gc.collect()
    assert len(kept_weights._STORES) == before

"""What `print(model)` says of a linear, on classes that print themselves and on others."""

from __future__ import annotations

import torch

from megatron_snip.linears import printed


class Own(torch.nn.Module):
    """As Megatron's linears: `__repr__` of its own."""

    def __repr__(self) -> str:
        return "Own(in=3)"


class Child(Own):
    """Inherits what is wrapped."""


def test_a_class_with_its_own_text_gets_the_option_appended() -> None:
    module, other, words = Own(), Own(), ["bf16, megatron"]
    printed.show(module, lambda: words[0])
    assert repr(module) == "Own(in=3) [snip bf16, megatron]"
    words[0] = "fp4, native"
    assert repr(torch.nn.Sequential(module)).count("[snip fp4, native]") == 1
    assert repr(other) == "Own(in=3)"
    printed.hide(module)
    printed.hide(module)
    assert repr(module) == "Own(in=3)"


def test_classes_are_wrapped_once() -> None:
    first, second, child = Own(), Own(), Child()
    for module in (first, second, child):
        printed.show(module, lambda: "fp8")
        printed.show(module, lambda: "fp8")
    assert {repr(m) for m in (first, second, child)} == {"Own(in=3) [snip fp8]"}


def test_other_modules_get_an_extra_repr() -> None:
    module, other = torch.nn.Linear(2, 3, bias=False), torch.nn.Linear(2, 3)
    plain, theirs = repr(module), repr(other)
    printed.show(module, lambda: "fp4, simulated")
    assert repr(module) == plain.replace(")", ", snip fp4, simulated)")
    assert repr(other) == theirs
    printed.hide(module)
    assert repr(module) == plain


def test_a_class_that_says_nothing_of_itself() -> None:
    module = torch.nn.Identity()
    printed.show(module, lambda: "fp8")
    assert repr(module) == "Identity(snip fp8)"
    assert list(module.state_dict()) == []

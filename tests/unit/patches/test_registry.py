"""The registry: install twice, undo to the very objects, refuse what others patched."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from megatron_snip.errors import UnsupportedError
from megatron_snip.patches.registry import Registry
from megatron_snip.patches.seams import SEAMS
from tests.unit.patches.fake_megatron import FakeController, FakeMegatron

ALL = ("always", "--snip", "--cpu")


def functions(fake: FakeMegatron) -> dict[str, Any]:
    modules = (fake.arguments, fake.training, fake.checkpointing, fake.global_vars)
    return {f"{m.__name__}.{k}": v for m in modules for k, v in vars(m).items() if callable(v)}


def changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    return {name.rsplit(".", 1)[-1] for name in before if before[name] is not after[name]}


OLD = ("fused-kernels", "validation-initialize")
"""Seams of older releases, whose functions are not here."""


def state_words(registry: Registry) -> dict[str, str]:
    return {seam.name: registry.state(seam).word for seam in registry.seams}


def test_without_snip_only_the_parser_is_wrapped(fake: FakeMegatron) -> None:
    before = functions(fake)
    registry = Registry(SEAMS)
    registry.install({"always"})
    assert changed(before, functions(fake)) == {"add_megatron_arguments"}
    words = state_words(registry)
    assert words.pop("arguments") == "installed"
    for name in OLD:
        assert words.pop(name) == "not needed"
    assert set(words.values()) == {"ready"}


def test_installing_twice_wraps_once(fake: FakeMegatron) -> None:
    registry = Registry(SEAMS)
    registry.install(ALL)
    once = functions(fake)
    registry.install(ALL)
    registry.install({"always"})
    assert functions(fake) == once


def test_undo_puts_back_the_very_objects(fake: FakeMegatron) -> None:
    before = functions(fake)
    registry = Registry(SEAMS)
    registry.install(ALL)
    assert len(changed(before, functions(fake))) == len(SEAMS) - len(OLD)
    controller: Any = FakeController()
    registry.session.controller = controller
    registry.uninstall()
    assert changed(before, functions(fake)) == set()
    assert controller.told == ["closed"]
    registry.uninstall()  # nothing is left to undo


def test_undo_refuses_what_others_have_replaced(fake: FakeMegatron) -> None:
    registry = Registry(SEAMS)
    registry.install(ALL)
    ours = functions(fake)
    fake.training.evaluate = foreign = lambda *args: None
    with pytest.raises(UnsupportedError, match=r"megatron\.training\.training\.evaluate was patch"):
        registry.uninstall()
    assert changed(ours, functions(fake)) == {"evaluate"}
    assert fake.training.evaluate is foreign
    assert state_words(registry)["evaluation"] == "overwritten"


def test_a_wrapper_around_ours_is_told_from_a_replacement(fake: FakeMegatron) -> None:
    registry = Registry(SEAMS)
    registry.install(ALL)
    ours = fake.training.evaluate
    fake.training.evaluate = functools.wraps(ours)(lambda *args: ours(*args))
    (seam,) = [s for s in SEAMS if s.name == "evaluation"]
    assert registry.state(seam).word == "installed"
    assert "wrapped it again" in registry.state(seam).detail
    with pytest.raises(UnsupportedError):
        registry.uninstall()
    fake.training.evaluate = ours
    registry.uninstall()


def test_a_missing_symbol_is_one_clear_error_and_nothing_is_changed(fake: FakeMegatron) -> None:
    del fake.training.train_step
    before = functions(fake)
    registry = Registry(SEAMS)
    with pytest.raises(UnsupportedError, match=r"has no megatron\.training\.training\.train_step"):
        registry.install(ALL)
    assert changed(before, functions(fake)) == set()
    assert state_words(registry)["train-step"] == "unusable"


def test_a_changed_signature_is_one_clear_error(fake: FakeMegatron) -> None:
    fake.training.train_step = lambda data_iterator, model: None
    with pytest.raises(UnsupportedError, match="takes no forward_backward_func, iteration"):
        Registry(SEAMS).install(ALL)


def test_wrappers_look_like_what_they_wrap(fake: FakeMegatron) -> None:
    original = fake.training.train_step
    registry = Registry(SEAMS)
    registry.install(ALL)
    assert fake.training.train_step.__name__ == "train_step"
    assert fake.training.train_step.__wrapped__ is original

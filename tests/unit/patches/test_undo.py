"""Attributes come back as the very objects that they were."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from megatron_snip.patches.undo import Undo


def test_what_was_there_comes_back_and_what_was_not_goes() -> None:
    before = object()
    owner = SimpleNamespace(there=before)
    undo = Undo()
    undo.set(owner, "there", 1)
    undo.set(owner, "there", 2)
    undo.set(owner, "new", 3)
    undo.wrap(owner, "new", lambda value: value + 1)
    assert (owner.there, owner.new) == (2, 4)
    undo.restore()
    assert owner.there is before and not hasattr(owner, "new")
    undo.restore()  # nothing is left to put back
    assert owner.there is before


def test_what_someone_else_has_replaced_stays(caplog: pytest.LogCaptureFixture) -> None:
    owner = SimpleNamespace(there=0)
    undo = Undo()
    undo.set(owner, "there", 1)
    owner.there = 2
    with caplog.at_level(logging.WARNING):
        undo.restore()
    assert owner.there == 2
    assert "there was replaced by someone else; left as it is" in caplog.text

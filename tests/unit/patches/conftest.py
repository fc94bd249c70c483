"""Fixtures of the patches' tests."""

import pytest

from tests.unit.patches.fake_megatron import FakeMegatron


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeMegatron:
    """A `megatron.training` for the length of a test."""
    return FakeMegatron(monkeypatch)

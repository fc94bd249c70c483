"""Megatron on one rank, for tests that need its model: a gloo group of this process alone."""

from collections.abc import Callable, Iterator

import pytest
from megatron.core.models.gpt import GPTModel

from megatron_snip.patches import cpu
from tests.models import FP32, alone, build

MakeModel = Callable[..., GPTModel]


@pytest.fixture(scope="module")
def megatron() -> Iterator[None]:
    """Parallel state of size 1, on the CPU patch; everything is put back."""
    installed = cpu.install()
    with alone("gloo"):
        yield
    if installed:
        cpu.uninstall()


@pytest.fixture
def make_model(megatron: None) -> MakeModel:
    """Build a small FP32 GPTModel of Megatron's linears; keywords go to its TransformerConfig."""
    return lambda **changes: build(te=False, **{"hidden_dropout": 0.1, **FP32, **changes})

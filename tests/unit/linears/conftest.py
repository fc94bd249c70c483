"""Megatron on one rank, for tests that need its model: a gloo group of this process alone."""

from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from megatron_snip.patches import cpu
from tests.te.models import build

MakeModel = Callable[..., GPTModel]


@pytest.fixture(scope="module")
def megatron() -> Iterator[None]:
    """Parallel state of size 1, on the CPU patch; everything is put back."""
    installed = cpu.install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        if installed:
            cpu.uninstall()


@pytest.fixture
def make_model(megatron: None) -> MakeModel:
    """Build a small GPTModel of Megatron's own linears; keywords go to its TransformerConfig."""
    return lambda **changes: build(te=False, **{"hidden_dropout": 0.1, **changes})

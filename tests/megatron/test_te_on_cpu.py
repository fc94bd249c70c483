"""Transformer Engine's linears on its own Python, with this tier's release of Megatron."""

import pytest

from tests.distributed.layouts import names
from tests.te_on_cpu.run import FAST, RUNS, TIME_LIMIT_S, run


@pytest.mark.timeout(TIME_LIMIT_S + 20)
@pytest.mark.parametrize("name", names(RUNS, FAST))
def test_transformer_engine_on_the_cpu(name: str) -> None:
    run(name)

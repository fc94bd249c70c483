"""Under tensor parallelism, what is measured is what Transformer Engine's GEMMs multiply.

Bit for bit, in every recipe, on both ranks: gathered inputs and gradients under sequence
parallelism, a shard's weight, and the scales of entire tensors over the ranks that share them.
"""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from tests.distributed.launch import Server, run_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """It finds Transformer Engine, and rounds to nearest, before it imports Megatron."""
    with closing(Server(preload=["tests.distributed.te_operands"])) as running:
        yield running


def on_ranks(server: Server, name: str, **arguments: Any) -> list[Any]:
    return run_ranks(2, f"tests.distributed.te_operands:{name}", arguments, server)


@pytest.mark.parametrize("layout", [{}, {"sequence_parallel": True}], ids=["TP", "TP and SP"])
def test_measured_operands_are_those_of_the_gemms(server: Server, layout: dict[str, Any]) -> None:
    for rank in on_ranks(server, "mismatches", layout=layout):
        assert len(rank) == 9
        different = [f"{name}: {text}" for name, found in rank.items() for text in found]
        assert not different, "\n".join(different[:20])


def test_options_that_a_gathered_input_excludes_are_refused_and_no_others(server: Server) -> None:
    for wrong in on_ranks(server, "wrong_refusals"):
        assert not wrong, "\n".join(wrong)

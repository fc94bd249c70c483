"""Under tensor parallelism, what is measured is what Transformer Engine's GEMMs multiply.

Bit for bit, in every recipe, on both ranks: gathered inputs and gradients under sequence
parallelism, a shard's weight, and the scales of entire tensors over the ranks that share them.
"""

from typing import Any

import pytest

from tests.distributed.launch import run_ranks

pytestmark = pytest.mark.slow

WORKER = "tests.distributed.te_operands:mismatches"


@pytest.mark.parametrize("layout", [{}, {"sequence_parallel": True}], ids=["TP", "TP and SP"])
def test_measured_operands_are_those_of_the_gemms(layout: dict[str, Any]) -> None:
    for rank in run_ranks(2, WORKER, {"layout": layout}):
        assert len(rank) == 9
        different = [f"{name}: {text}" for name, found in rank.items() for text in found]
        assert not different, "\n".join(different[:20])


def test_options_that_a_gathered_input_excludes_are_refused_and_no_others() -> None:
    for wrong in run_ranks(2, "tests.distributed.te_operands:wrong_refusals", {}):
        assert not wrong, "\n".join(wrong)

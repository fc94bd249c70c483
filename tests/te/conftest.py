"""Megatron with Transformer Engine's linears on one rank; the stand-in of it, on a CPU.

These tests run in a process of their own, in which the stand-in is found before Megatron is
imported (tests/unit/linears/test_te_stand_in.py starts it):

    SNIP_TE_STAND_IN=1 pytest tests/te

Tests marked `real_te` need no stand-in. With Transformer Engine (launch/te.sh):

    SNIP_TE_REAL=1 pytest -m real_te tests/te

Without a GPU only those run that compare the stand-in with it.
"""

import os
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

collect_ignore_glob = ["test_*.py"]


if os.environ.get("SNIP_TE_REAL") == "1":
    import torch

    collect_ignore_glob = [f"test_te_{name}.py" for name in ("mod*", "quantizers", "times")]

    def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
        """Without a GPU, skip what multiplies."""
        skip = pytest.mark.skip(reason="Transformer Engine multiplies on a GPU only; none is here")
        for item in items:
            if not torch.cuda.is_available() and item.path.name != "test_te_contract.py":
                item.add_marker(skip)

    @pytest.fixture(scope="session", autouse=True)
    def megatron() -> Iterator[None]:
        """Parallel state of size 1 on the GPU."""
        from tests.te.models import alone

        with alone("nccl") if torch.cuda.is_available() else nullcontext():
            yield

elif os.environ.get("SNIP_TE_STAND_IN") == "1":
    collect_ignore_glob = []

    import tests.stand_ins.on_path  # noqa: F401 - before anything that imports Megatron

    @pytest.fixture(scope="session", autouse=True)
    def megatron() -> Iterator[None]:
        """Parallel state of size 1 under the CPU patch, as on a Blackwell GPU."""
        from megatron_snip.patches import cpu

        cpu.install(claim_cuda=True, capability=(10, 0))
        from tests.te.models import alone

        with alone("gloo"):
            yield

    @pytest.fixture(autouse=True)
    def autocast() -> Iterator[None]:
        """No test leaves one open; warnings are logged again."""
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        from megatron_snip.log import forget_warnings

        forget_warnings()
        FP8GlobalStateManager.entered = 0
        yield
        assert not FP8GlobalStateManager.enabled

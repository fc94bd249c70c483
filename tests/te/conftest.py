"""Megatron with Transformer Engine's linears on one rank.

On a CPU Transformer Engine's own Python runs on an extension in PyTorch (tests/te_on_cpu), in a
process that finds it before Megatron is imported (tests/unit/linears/test_te_on_cpu.py starts it):

    SNIP_TE_ON_CPU=1 pytest tests/te

Tests marked `real_te` look at no GEMM's operands and run with the real build as well, on a GPU
(launch/te.sh):

    SNIP_TE_REAL=1 pytest -m real_te tests/te

Without a GPU only the record of its signatures and quantizers is compared with it.
"""

import os
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

collect_ignore_glob = ["test_*.py"]


if os.environ.get("SNIP_TE_REAL") == "1":
    import torch

    collect_ignore_glob = [
        f"test_te_{name}.py" for name in ("layers", "mod*", "quantizers", "times")
    ]

    def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
        """Without a GPU, skip what multiplies."""
        skip = pytest.mark.skip(reason="Transformer Engine multiplies on a GPU only; none is here")
        for item in items:
            if not torch.cuda.is_available() and item.path.name != "test_te_contract.py":
                item.add_marker(skip)

    @pytest.fixture(scope="session", autouse=True)
    def megatron() -> Iterator[None]:
        """Parallel state of size 1 on the GPU."""
        from tests.models import alone

        with alone("nccl") if torch.cuda.is_available() else nullcontext():
            yield

elif os.environ.get("SNIP_TE_ON_CPU") == "1":
    collect_ignore_glob = []

    from tests import te_on_cpu

    te_on_cpu.install(release=os.environ.get("SNIP_TE_RELEASE", te_on_cpu.RELEASES[0]))

    @pytest.fixture(scope="session", autouse=True)
    def megatron() -> Iterator[None]:
        """Parallel state of size 1, as on a Blackwell GPU."""
        from tests.models import alone

        with alone("gloo"):
            yield

    @pytest.fixture(autouse=True)
    def autocast() -> Iterator[None]:
        """No test leaves one open, or another GPU; warnings are logged again."""
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        from megatron_snip.log import forget_warnings
        from tests.te_on_cpu import capability

        forget_warnings()
        capability.forget()
        FP8GlobalStateManager.reset()
        yield
        assert not FP8GlobalStateManager.is_fp8_enabled()

"""Another GPU for the rest of a test: its compute capability, and no memory of the one before.

Transformer Engine asks once per process what the GPU can do.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch


@contextmanager
def on(capability: tuple[int, int]) -> Iterator[None]:
    """Run as on a GPU of this compute capability."""
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=capability):
        forget()
        yield
    forget()


def forget() -> None:
    """Make Transformer Engine ask again what the GPU can do."""
    for name, module in list(sys.modules.items()):
        if not name.startswith("transformer_engine.pytorch"):
            continue
        for key, value in list(vars(module).items()):
            if key.endswith("_SUPPORT"):
                setattr(module, key, None)
            elif key.endswith(("_gemm_supported", "_compute_capability")):
                getattr(value, "cache_clear", lambda: None)()

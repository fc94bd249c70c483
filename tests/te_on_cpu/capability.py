"""Another GPU for the rest of a test: its compute capability, and no memory of the one before.

Transformer Engine asks once per process what the GPU can do.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch


def answers(capability: tuple[int, int]) -> list[tuple[Any, str, Any]]:
    """Return what a GPU of this compute capability says: (owner, attribute, value)."""
    properties = torch.cuda.get_device_properties(0)
    major, minor = capability
    return [
        (torch.cuda, "get_device_capability", lambda *_: capability),
        (properties, "major", major),
        (properties, "minor", minor),
    ]


@contextmanager
def on(capability: tuple[int, int]) -> Iterator[None]:
    """Run as on a GPU of this compute capability."""
    with ExitStack() as stack:
        for owner, name, value in answers(capability):
            stack.enter_context(mock.patch.object(owner, name, value))
        forget()
        yield
    forget()


def forget() -> None:
    """Make Transformer Engine ask again what the GPU can do."""
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith("transformer_engine.pytorch"):
            continue
        for key, value in list(vars(module).items()):
            if key.endswith("_SUPPORT"):
                setattr(module, key, None)
            elif key.endswith(("_gemm_supported", "_compute_capability", "_support")):
                getattr(value, "cache_clear", lambda: None)()
            elif key == "FP8GlobalStateManager":  # before 2.20
                for name in [n for n in vars(value) if n.endswith("_available")]:
                    if vars(value)[name] in (True, False):
                        setattr(value, name, None)

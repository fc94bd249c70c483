"""Packages of kernels that a machine without a GPU lacks: enough of them to build a model.

Megatron builds no Mamba layer and no flexible dispatcher of experts without these packages, whose
kernels only a forward runs.
"""

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

PACKAGES = ("mamba_ssm", "causal_conv1d", "fla", "deep_ep", "fast_hadamard_transform")


@contextmanager
def stand_ins() -> Iterator[None]:
    """Within the block those of `PACKAGES` that are not installed can be imported."""
    finder = _Finder(tuple(n for n in PACKAGES if importlib.util.find_spec(n) is None))
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder(MetaPathFinder, Loader):
    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in self._packages:
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: its attributes are made when they are asked for."""


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Part


class _HasAll(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


class _Part(torch.nn.Module, metaclass=_HasAll):
    """Stands for a function or a norm."""

    def __init__(self, size: Any = 0, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(size if isinstance(size, int) else 0))

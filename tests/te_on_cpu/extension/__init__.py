"""`transformer_engine_torch` of Transformer Engine 2.20.2 in PyTorch, for CPUs.

What this project and Megatron-Core call is here, a module per subject. A docstring names the C++
that a function stands for: files without a folder are in transformer_engine/pytorch/csrc (and its
extensions/), `common/` is transformer_engine/common. Every other name of the extension exists, and
raises NotImplementedError when it is called.

Numbers are those of the kernels where these leave no choice: casts, scales and amaxes bit by bit.
Sums (GEMMs, norms) are FP32 in torch's order. Stochastic rounding draws from torch's generator.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from tests.te_on_cpu.extension import (
    activations,
    enums,
    gemm,
    grouped,
    layout,
    machine,
    norms,
    optimizers,
    quantize,
    recipe,
    shards,
    softmax,
)

_SUBJECTS = (
    *(activations, gemm, grouped, layout, machine, norms, optimizers),
    *(quantize, recipe, shards, softmax),
)
_NAMES = (Path(__file__).parent / "names.txt").read_text().split()
"""The functions of the extension (pybind.cpp and what it includes)."""


def _missing(name: str) -> Callable[..., NoReturn]:
    def missing(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"transformer_engine_torch.{name} does not run on the CPU")

    missing.__name__ = name
    return missing


def _function(name: str) -> Callable[..., Any]:
    found = (vars(subject).get(name) for subject in _SUBJECTS)
    return next(filter(callable, found), _missing(name))


globals().update({name: value for name, value in vars(enums).items() if isinstance(value, type)})
globals().update({name: _function(name) for name in _NAMES})


class _Submodule:
    """A submodule of the extension of which nothing is here."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        return _missing(f"{self._name}.{name}")


grouped_mlp_experimental = _Submodule("grouped_mlp_experimental")

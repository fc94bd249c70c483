"""What a machine and its Transformer Engine say they can run."""

from __future__ import annotations

import sys

import pytest
import torch
from megatron_snip.linears.backends import Backend, Machine
from megatron_snip.linears.te_support import has_per_gemm, this_machine
from transformer_engine.pytorch import quantization
from transformer_engine.pytorch.tensor import hybrid_tensor

from megatron_snip.linears import backends
from megatron_snip.options import Option

Capability = tuple[int, int]


def on(monkeypatch: pytest.MonkeyPatch, capability: Capability) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)


@pytest.mark.parametrize(
    ("capability", "unavailable"),
    [
        ((8, 0), {"blockwise", "mxfp8", "nvfp4"}),
        ((8, 9), {"blockwise", "mxfp8", "nvfp4"}),
        ((9, 0), {"mxfp8", "nvfp4"}),
        ((10, 0), set()),
        ((12, 0), {"mxfp8"}),
    ],
)
def test_transformer_engine_is_asked(
    monkeypatch: pytest.MonkeyPatch, capability: Capability, unavailable: set[str]
) -> None:
    on(monkeypatch, capability)
    machine = this_machine(with_te=True)
    assert (machine.capability, machine.te_version) == (capability, "2.20.2")
    assert machine.te_per_gemm
    assert set(machine.te_unavailable) == unavailable
    # The table never offers what Transformer Engine would refuse.
    for fmt in ("fp8", "mxfp8", "fp4", "nvfp4"):
        unasked = Machine(capability, "2.20.2")
        if backends.refusal(Backend.TE, Option.uniform(fmt), unasked) is None:
            word = backends.te_recipe(Option.uniform(fmt), machine).fprop
            assert word not in machine.te_unavailable


def test_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    machine = this_machine(with_te=True)
    assert machine.capability is None and machine.te_version == "2.20.2"
    assert machine.te_unavailable == {}


def test_without_such_linears_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    assert this_machine(with_te=False) == Machine((10, 0))


def test_a_transformer_engine_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    assert this_machine(with_te=True) == Machine((10, 0))


def test_an_older_one_knows_fewer_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = quantization.FP8GlobalStateManager
    monkeypatch.delattr(manager, "is_nvfp4_available")
    machine = this_machine(with_te=True)
    assert machine.te_unavailable == {"nvfp4": "this Transformer Engine does not know the recipe"}
    reason = backends.refusal(Backend.TE, Option.uniform("fp4"), machine)
    assert reason is not None
    assert reason.endswith(": this Transformer Engine does not know the recipe")


@pytest.mark.parametrize(
    ("module", "name"), [(hybrid_tensor, "HybridQuantizer"), (quantization, "QuantizerRole")]
)
def test_an_older_one_has_no_quantizers_by_gemm(
    monkeypatch: pytest.MonkeyPatch, module: object, name: str
) -> None:
    assert has_per_gemm()
    monkeypatch.delattr(module, name)
    assert not has_per_gemm()
    assert not this_machine(with_te=True).te_per_gemm

"""The check that a machine's FP8 GEMMs are right, by running it where they are and where not."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_snip.linears import native, native_support
from megatron_snip.linears.backends import Machine
from megatron_snip.linears.native_support import native_obstacle, with_native, worst_error
from megatron_snip.types import Gemm

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    native_support._tried.cache_clear()
    yield
    native_support._tried.cache_clear()


def test_the_emulation_passes_far_below_the_device_s_tolerance() -> None:
    error, where = worst_error(CPU)
    assert 0 < error < 2.0**-18
    assert where.split(" ")[0] in list(Gemm)


def test_samples_have_grids_that_are_not_square() -> None:
    samples = native_support.sample_operands("fp8", CPU)
    depths = {-(-a.depth // 128) for a, _ in samples.values()}
    assert depths == {1, 3, 5}
    for a, b in samples.values():
        assert -(-b.rows // 128) != -(-b.depth // 128) or not b.square
        assert a.depth == b.depth


def wrong_scales(operand: Any) -> Any:
    """As if a device read the operand's scales transposed."""
    turned = operand.scales.t().reshape(operand.scales.shape[::-1]).contiguous()
    memory = turned.view(-1).clone()
    out = torch.empty_strided(operand.scales.shape, operand.scales.stride())
    out.as_strided((out.numel(),), (1,)).copy_(memory.flip(0))
    return dataclasses.replace(operand, scales=out)


def test_a_device_that_reads_scales_otherwise_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def misreading(a: Any, b: Any, dtype: torch.dtype) -> torch.Tensor:
        return native.multiply(a, wrong_scales(b), dtype)

    monkeypatch.setattr(native_support, "multiply", misreading)
    assert worst_error(CPU)[0] > 10 * native.DEVICE_TOLERANCE
    monkeypatch.setattr(native_support, "worst_error", lambda _: worst_error(CPU))
    assert "its check failed: " in native_obstacle((9, 0))


def test_nan_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(a: Any, b: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((a.rows, b.rows), float("nan"), dtype=dtype)

    monkeypatch.setattr(native_support, "multiply", broken)
    monkeypatch.setattr(native_support, "worst_error", lambda _: worst_error(CPU))
    assert "is off by nan" in native_obstacle((9, 0))


def test_a_library_that_refuses_is_an_obstacle_and_not_an_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: torch.device) -> tuple[float, str]:
        raise RuntimeError("scaling requires\ncublasLt >= 12.9")

    monkeypatch.setattr(native_support, "worst_error", refuse)
    found = native_obstacle((9, 0))
    assert found == "its check failed: RuntimeError: scaling requires cublasLt >= 12.9"


def test_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_support, "worst_error", lambda _: (1e-5, "fprop in fp8"))
    assert with_native(Machine((9, 0))) == Machine((9, 0))
    assert with_native(Machine(None)).native_obstacle == "needs a GPU of compute capability 9.0"
    assert "this GPU has 10.0" in with_native(Machine((10, 0))).native_obstacle
    monkeypatch.delattr(torch.nn.functional, "scaled_mm")
    assert "has no scaled_mm" in native_obstacle((9, 0))

"""The check that a machine's FP8 GEMMs are right, by running it where they are and where not."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron_snip.linears.backends import Machine
from megatron_snip.linears.native_gemm import GemmOperand
from megatron_snip.linears.native_support import (
    RAGGED,
    WHOLE,
    agreed,
    native_obstacle,
    sample_operands,
    with_native,
    worst_error,
)
from megatron_snip.quantizers.codes import decode_e4m3

from megatron_snip.linears import native, native_gemm, native_support
from megatron_snip.types import Gemm

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    native_support._tried.cache_clear()
    yield
    native_support._tried.cache_clear()
    native_gemm.align_to(16)


def on_cpu(_: torch.device, shape: tuple[int, int, int]) -> tuple[float, str]:
    return worst_error(CPU, shape)


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
    monkeypatch.setattr(native_support, "worst_error", on_cpu)
    assert "its check failed: " in native_obstacle((9, 0))


def test_nan_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(a: Any, b: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((a.rows, b.rows), float("nan"), dtype=dtype)

    monkeypatch.setattr(native_support, "multiply", broken)
    monkeypatch.setattr(native_support, "worst_error", on_cpu)
    assert "is off by nan" in native_obstacle((9, 0))


def test_a_library_that_refuses_is_an_obstacle_and_not_an_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> tuple[float, str]:
        raise RuntimeError("scaling requires\ncublasLt >= 12.9")

    monkeypatch.setattr(native_support, "worst_error", refuse)
    found = native_obstacle((9, 0))
    assert found == "its check failed: RuntimeError: scaling requires cublasLt >= 12.9"


def test_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_support, "worst_error", lambda *_: (1e-5, "fprop in fp8"))
    assert with_native(Machine((9, 0))) == Machine((9, 0))
    assert with_native(Machine(None)).native_obstacle == "needs a GPU of compute capability 9.0"
    assert "this GPU has 10.0" in with_native(Machine((10, 0))).native_obstacle
    monkeypatch.delattr(torch.nn.functional, "scaled_mm")
    assert "has no scaled_mm" in native_obstacle((9, 0))


@pytest.mark.parametrize("shape", RAGGED)
def test_dims_within_a_block_and_a_single_token_pass(shape: tuple[int, int, int]) -> None:
    assert worst_error(CPU, shape)[0] < 2.0**-18


def test_dims_that_the_library_lacks_are_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS's own layouts end at ceilings, but its GEMMs are only known to run at whole blocks."""

    def whole_blocks_only(a: Any, b: Any, dtype: torch.dtype) -> torch.Tensor:
        if any(side % 128 for each in (a, b) for side in each.codes.shape):
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
        return native.multiply(a, b, dtype)

    before = sample_operands("fp8", CPU, RAGGED[0])
    monkeypatch.setattr(native_support, "multiply", whole_blocks_only)
    monkeypatch.setattr(native_support, "worst_error", on_cpu)
    assert native_obstacle((9, 0)) == ""
    after = sample_operands("fp8", CPU, RAGGED[0])
    for gemm, (a, b) in after.items():
        assert not any(side % 128 for each in (a, b) for side in each.codes.shape)
        old = native.multiply(*before[gemm], torch.float32)
        assert torch.equal(native.multiply(a, b, torch.float32), old)


def test_what_fails_padded_as_well_is_an_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    def ragged_is_wrong(_: torch.device, shape: tuple[int, int, int]) -> tuple[float, str]:
        return (0.0 if shape == WHOLE else 1.0), "wgrad in fp4 to float32"

    monkeypatch.setattr(native_support, "worst_error", ragged_is_wrong)
    found = native_obstacle((9, 0))
    assert found.startswith("its check with 200 tokens of 176 and 328 features failed: wgrad")


def hopper_sum(a: GemmOperand, b: GemmOperand, rows: slice, cols: slice) -> torch.Tensor:
    """A B^T as tensor cores add: 32 products and the sum so far, cut at 2^-13 of the largest."""
    x, y = decode_e4m3(a.codes).double()[rows], decode_e4m3(b.codes).double()[cols]
    of_a, of_b = a.scales.double()[rows], b.scales.double()
    of_b = of_b.T.repeat_interleave(128, 0)[cols] if b.square else of_b[cols]
    total = torch.zeros(len(x), len(y), dtype=torch.float64)
    for start in range(0, x.shape[1], 128):
        held = torch.zeros_like(total)
        for first in range(start, min(start + 128, x.shape[1]), 32):
            left, right = x[:, None, first : first + 32], y[None, :, first : first + 32]
            powers = torch.frexp(left)[1] + torch.frexp(right)[1] - 2
            terms = torch.cat([left * right, held[..., None]], -1)
            powers = torch.cat([powers, torch.frexp(held)[1][..., None] - 1], -1)
            powers = powers.masked_fill(terms == 0, -100).amax(-1, keepdim=True)
            step = torch.exp2((powers - 13).double())
            held = (torch.floor(terms / step) * step).sum(-1)
        block = start // 128
        total += held * of_a[:, block : block + 1] * of_b[:, block]
    return total


def test_a_right_device_passes_however_coarsely_it_adds() -> None:
    """Products of gradients and inputs spread over many powers of two: wgrad is the worst."""
    worst = 0.0
    for a, b in sample_operands("fp8", CPU).values():
        rows, cols = slice(40, 72), slice(64, 128)
        truth, size = (t[rows, cols] for t in native_support._truth(a, b))
        worst = max(worst, float(((hopper_sum(a, b, rows, cols) - truth).abs() / size).max()))
    assert 2.0**-9 < worst <= native.DEVICE_TOLERANCE / 2


def test_what_one_rank_cannot_no_rank_does(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [["", 16], ["its check failed: no", 128], ["", 16]]
    monkeypatch.setattr(native_support, "gather_json", lambda *_: ranks)
    found = agreed(Machine((9, 0)), None)
    assert found.native_obstacle == "on rank 1 its check failed: no"
    assert native_gemm.alignment() == 128
    own = Machine((9, 0), native_obstacle="its check failed: no")
    assert agreed(own, None) == own
    ranks[1:] = []
    assert agreed(Machine((9, 0)), None) == Machine((9, 0))

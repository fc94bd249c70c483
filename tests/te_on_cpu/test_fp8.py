"""FP8's bytes against ml_dtypes and torchao; the history of delayed scaling against NumPy."""

from contextlib import ExitStack
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import transformer_engine_torch as tex
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
from transformer_engine.pytorch.tensor.float8_tensor import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
)
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

from tests.te_on_cpu import capability
from tests.te_on_cpu.extension.operands import values_of

ml_dtypes = pytest.importorskip("ml_dtypes")
with mock.patch("torch.utils._triton.has_triton", return_value=False):  # it asks for the GPU
    mx_config = pytest.importorskip("torchao.prototype.mx_formats.config")
    mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")

FP8 = {
    "e4m3": (DType.kFloat8E4M3, torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn, 448.0),
    "e5m2": (DType.kFloat8E5M2, torch.float8_e5m2, ml_dtypes.float8_e5m2, 57344.0),
}


def drawn(num_rows: int = 160, num_columns: int = 288) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(num_rows, num_columns, generator=generator)
    x[3] *= 1e4
    x[:, 9] *= 1e-5
    x[32:64, 32:64] = 0.0
    return x.bfloat16()


def cast(x: np.ndarray, kind: str) -> np.ndarray:
    *_, dtype, largest = FP8[kind]
    return np.clip(x, -largest, largest).astype(dtype).view(np.uint8)


def array(tensor: torch.Tensor) -> Any:
    return tensor.float().numpy()


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("kind", FP8)
def test_current_scaling(gpu: ExitStack, kind: str, hopper: bool) -> None:
    if hopper:
        gpu.enter_context(capability.on((9, 0)))
    x = drawn()
    found = Float8CurrentScalingQuantizer(FP8[kind][0], device="cpu")(x)
    scale = np.float32(FP8[kind][3]) / np.abs(array(x)).max()
    data = cast(array(x) * scale, kind)
    assert np.array_equal(found._data.numpy(), data)
    assert found._scale_inv.item() == np.float32(1.0) / scale
    if hopper:
        assert np.array_equal(found._transpose.numpy(), data.T)
    else:
        assert found._transpose is None


@pytest.mark.parametrize("kind", FP8)
def test_delayed_scaling_casts_by_the_scale_and_notes_the_amax(kind: str) -> None:
    x = drawn()
    scale = torch.tensor([0.37])
    amax = torch.tensor([1.0])
    found = Float8Quantizer(scale, amax, FP8[kind][0])(x)
    assert np.array_equal(found._data.numpy(), cast(array(x) * np.float32(0.37), kind))
    assert amax.item() == np.abs(array(x)).max()
    Float8Quantizer(scale, amax, FP8[kind][0])(x * 0.5)
    assert amax.item() == np.abs(array(x)).max()


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("dim", [1, 2])
def test_block_scaling(dim: int, power_of_two: bool) -> None:
    x = drawn()
    quantizer = Float8BlockQuantizer(
        DType.kFloat8E4M3,
        rowwise=True,
        columnwise=True,
        force_pow_2_scales=power_of_two,
        block_scaling_dim=dim,
    )
    found = quantizer(x)
    for columnwise in (False, True):
        values = array(x).T if columnwise else array(x)
        wanted = np.empty_like(values)
        height = 128 if dim == 2 else 1
        for top in range(0, values.shape[0], height):
            for left in range(0, values.shape[1], 128):
                where = np.s_[top : top + height, left : left + 128]
                amax = np.abs(values[where]).max()
                scale = np.float32(448.0) / amax if amax else np.float32(1.0)
                if power_of_two:
                    scale = np.float32(2.0) ** np.floor(np.log2(scale))
                bits = cast(values[where] * scale, "e4m3").view(ml_dtypes.float8_e4m3fn)
                wanted[where] = bits.astype(np.float32) * (np.float32(1.0) / scale)
        wanted = wanted.T if columnwise else wanted
        assert np.array_equal(values_of(found, columnwise).numpy(), wanted)


@pytest.mark.parametrize("kind", FP8)
def test_mxfp8(kind: str) -> None:
    code, dtype, *_ = FP8[kind]
    x = drawn()
    found = MXFP8Quantizer(code, rowwise=True, columnwise=True)(x)
    for columnwise in (False, True):
        matrix = x.t().contiguous() if columnwise else x
        scale, data = mx_tensor.to_mx(matrix, dtype, 32, mx_config.ScaleCalculationMode.RCEIL)
        values = data.float().reshape(*scale.shape, 32) * scale.float()[..., None]
        values = values.reshape(matrix.shape)
        assert torch.equal(values_of(found, columnwise), values.t() if columnwise else values)


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("kind", FP8)
def test_scales_follow_the_history_of_amaxes(kind: str, algorithm: str) -> None:
    """Three steps of three tensors: one grows, one is not quantized, one overflows."""
    history = torch.zeros(3, 3)
    scale = torch.ones(3)
    largest = np.float32(FP8[kind][3] / 2)
    past: list[list[float]] = [[], [], []]
    wanted = [1.0, 1.0, 1.0]
    for amaxes in ([0.5, 0.0, 3.0], [4.0, 0.0, float("inf")], [2.0, 0.0, 1.0], [1.0, 7.0, 1.0]):
        reduced = torch.tensor(amaxes)
        tex.fused_amax_and_scale_update_after_reduction(
            reduced, [history], [scale], algorithm, FP8[kind][0], 1.0
        )
        for i, amax in enumerate(amaxes):
            if amax:
                past[i] = [*past[i], amax][-3:]
                used = max(past[i]) if algorithm == "max" else amax
                wanted[i] = float(largest / np.float32(used)) if np.isfinite(used) else wanted[i]
        assert scale.tolist() == wanted
        assert not history[0].any()

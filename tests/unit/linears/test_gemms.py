"""The three GEMMs under an option."""

from __future__ import annotations

import pytest
import torch

from megatron_snip.linears import gemms
from megatron_snip.matmul import matmul_fp32
from megatron_snip.options import BF16, Option
from megatron_snip.quantizers import (
    StochasticStream,
    StreamKey,
    quantize_dequantize_operand,
)
from megatron_snip.types import Gemm, Operand

STREAM = StochasticStream(StreamKey(0, "linear", 1, 2))


def tensors(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((160, 128), (256, 128), (160, 256))
    x, w, g = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return x, w, g


def seen(tensor: torch.Tensor, name: str, operand: Operand, gemm: Gemm) -> torch.Tensor:
    return quantize_dequantize_operand(
        tensor, name, operand, gemm, stream=STREAM, dtype=torch.float32
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["fp8", "fp4", "mxfp4", "nvfp4"])
def test_operands_are_quantized_and_the_result_is_rounded_once(
    name: str, dtype: torch.dtype
) -> None:
    x, w, g = tensors(dtype)
    option = Option.uniform(name)
    i, weight, out = Operand.INPUT, Operand.WEIGHT, Operand.GRAD_OUTPUT
    y = matmul_fp32(seen(x, name, i, Gemm.FPROP), seen(w, name, weight, Gemm.FPROP).t())
    assert torch.equal(gemms.fprop(x, w, option), y.to(dtype))
    dx = matmul_fp32(seen(g, name, out, Gemm.DGRAD), seen(w, name, weight, Gemm.DGRAD))
    assert torch.equal(gemms.dgrad(g, w, option, STREAM), dx.to(dtype))
    dw = matmul_fp32(seen(g, name, out, Gemm.WGRAD).t(), seen(x, name, i, Gemm.WGRAD))
    found = gemms.wgrad(g, x, option, STREAM)
    assert found.dtype == torch.float32  # main_grad adds it up before any rounding
    assert torch.equal(found, dw)


def test_gemms_choose_apart() -> None:
    x, w, g = tensors(torch.float32)
    mixed, fp4 = Option("bf16", "fp4", "fp8"), Option.uniform("fp4")
    assert torch.equal(gemms.fprop(x, w, mixed), x @ w.t())
    assert torch.equal(gemms.dgrad(g, w, mixed, STREAM), gemms.dgrad(g, w, fp4, STREAM))
    assert torch.equal(
        gemms.wgrad(g, x, mixed, STREAM), gemms.wgrad(g, x, Option.uniform("fp8"), STREAM)
    )


def test_bf16_gemms_are_the_plain_ones() -> None:
    x, w, g = tensors(torch.bfloat16)
    assert torch.equal(gemms.fprop(x, w, BF16), torch.matmul(x, w.t()))
    assert torch.equal(gemms.dgrad(g, w, BF16, STREAM), g.matmul(w))
    assert torch.equal(gemms.wgrad(g, x, BF16, STREAM), g.t().matmul(x))
    exact = gemms.wgrad(g, x, BF16, STREAM, fp32_output=True)
    assert exact.dtype == torch.float32
    torch.testing.assert_close(exact.double(), g.double().t() @ x.double(), rtol=1e-5, atol=1e-4)


def test_the_copies_of_grad_output_round_apart_and_replay() -> None:
    """dgrad and wgrad draw their own numbers; drawing again gives the same."""
    x, w, g = tensors(torch.float32)
    fp4 = Option.uniform("fp4")
    assert torch.equal(gemms.dgrad(g, w, fp4, STREAM), gemms.dgrad(g, w, fp4, STREAM))
    other = StochasticStream(StreamKey(0, "linear", 1, 3))
    assert not torch.equal(gemms.dgrad(g, w, fp4, STREAM), gemms.dgrad(g, w, fp4, other))
    assert not torch.equal(gemms.wgrad(g, x, fp4, STREAM), gemms.wgrad(g, x, fp4, other))
    assert torch.equal(gemms.fprop(x, w, fp4), gemms.fprop(x, w, fp4))

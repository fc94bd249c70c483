"""Products with FP32 accumulation and output."""

import pytest
import torch

from megatron_snip.matmul import matmul_fp32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_operands_enter_exactly_and_the_result_is_not_rounded(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn((5, 300), generator=generator).to(dtype)
    b = torch.randn((7, 300), generator=generator).to(dtype)
    got = matmul_fp32(a, b.t())
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), a.double() @ b.double().t(), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("size", [64, 1024])
def test_on_a_gpu_16_bit_operands_enter_exactly(size: int) -> None:
    a, b = (torch.randn(size, size, device="cuda").bfloat16() for _ in range(2))
    wanted = (a.double() @ b.double()).float()
    torch.testing.assert_close(matmul_fp32(a, b), wanted, rtol=1e-4, atol=1e-3)

"""Products with FP32 accumulation and FP32 output, for error norms and exact emulation.

On the CPU operands are taken as FP32, so dequantized values (q * s) enter exactly. On a GPU
operands of at most 16 bits enter as they are, FP32 ones are rounded to BF16 first (relative 2^-9
an element, against 2^-4 or more of the formats measured) because FP32 GEMMs run at a tenth of the
tensor cores' rate; accumulation and output stay FP32.
"""

import torch

LARGE_GEMM = 1 << 24
"""Multiply-adds from which a GPU's tensor cores pay, and FP32 operands are rounded to BF16."""


def matmul_fp32(
    a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return a @ b, accumulated in FP32 and rounded once to `dtype`.

    Args:
        a: [rows, inner], BF16, FP16 or FP32.
        b: [inner, cols], the same device.
        dtype: BF16 or FP32; a GPU's GEMM writes it itself.

    Returns:
        [rows, cols].
    """
    if not a.is_cuda:
        return (a.float() @ b.float()).to(dtype)
    small = a.shape[0] * a.shape[1] * b.shape[1] <= LARGE_GEMM
    if a.dtype == torch.float32 and b.dtype == torch.float32 and small:
        return (a @ b).to(dtype)
    return torch.mm(a.to(torch.bfloat16), b.to(torch.bfloat16), out_dtype=dtype)

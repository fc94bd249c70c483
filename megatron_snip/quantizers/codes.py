"""Grid values as E4M3 bytes, the payload that FP8 tensor cores take.

Every E2M1 (0, .5, 1, 1.5, 2, 3, 4, 6) and E2M0 (0, 1, 2, 4) value is an E4M3 value, so an FP4
operand runs on FP8 tensor cores without loss: E4M3 payload, the FP4 scale beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def encode_e4m3(values: Tensor) -> Tensor:
    """Return the E4M3 bytes of numbers on the E4M3 grid.

    Args:
        values: FP32, exactly representable in E4M3, or NaN.

    Returns:
        uint8 of that shape; NaN is 0x7F, zero 0x00.
    """
    codes = values.to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.masked_fill_(values.isnan(), 0x7F)  # the sign of a NaN depends on the machine


def decode_e4m3(codes: Tensor) -> Tensor:
    """Return the FP32 numbers that E4M3 bytes (uint8) stand for."""
    return codes.view(torch.float8_e4m3fn).to(torch.float32)

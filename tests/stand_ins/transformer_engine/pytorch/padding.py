"""Rows of zeros behind every expert's tokens, and their removal."""

import torch
from transformer_engine.common.recipe import MXFP8BlockScaling
from transformer_engine.pytorch.quantization import FP8GlobalStateManager


def align_size() -> int:
    return 32 if isinstance(FP8GlobalStateManager.get_fp8_recipe(), MXFP8BlockScaling) else 16


class _Padding(torch.nn.Module):
    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms = num_gemms
        self.align_size = align_size

    def padded(self, m_splits: list[int]) -> list[int]:
        assert len(m_splits) == self.num_gemms
        if self.align_size is None:
            self.align_size = align_size()
        return [-(-m // self.align_size) * self.align_size for m in m_splits]


class Fp8Padding(_Padding):
    def forward(self, inp: torch.Tensor, m_splits: list[int]) -> tuple[torch.Tensor, list[int]]:
        padded = self.padded(m_splits)
        pieces = [
            torch.nn.functional.pad(piece, (0, 0, 0, size - len(piece)))
            for piece, size in zip(torch.split(inp, m_splits), padded, strict=True)
        ]
        return torch.cat(pieces), padded


class Fp8Unpadding(_Padding):
    def forward(self, inp: torch.Tensor, m_splits: list[int]) -> torch.Tensor:
        pieces = torch.split(inp, self.padded(m_splits))
        return torch.cat([p[:m] for p, m in zip(pieces, m_splits, strict=True)])

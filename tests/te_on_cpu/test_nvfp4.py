"""NVFP4's bytes are those of Transformer Engine's own reference in Python (NVFP4QuantizerRef)."""

from typing import Any

import pytest
import torch
from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4QuantizerRef
from transformer_engine.pytorch.custom_recipes.reference_utils import Fp4Formats
from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

CASES: dict[str, dict[str, Any]] = {
    "rows and columns": {},
    "rotated columns": {"with_rht": True},
    "blocks": {"with_2d_quantization": True},
    "row-scaled": {"row_scaled_nvfp4": True},
    "4over6": {"nvfp4_use_4over6": True},
    "4over6, mean square": {"nvfp4_use_4over6": True, "nvfp4_4over6_err_mode": "MSE"},
    "4over6, 256": {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": 256},
    "4over6, blocks": {"nvfp4_use_4over6": True, "with_2d_quantization": True},
}


def drawn(kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, 96, generator=generator)
    if kind == "outliers":
        x[5] *= 300.0
        x[:, 7] *= 1e-4
        x[16:32, 16:48] = 0.0
    elif kind == "ties":
        x = torch.randint(-24, 25, (64, 96), generator=generator) / 4.0
    return x.bfloat16()


@pytest.mark.parametrize("kind", ["normal", "outliers", "ties"])
@pytest.mark.parametrize("case", CASES)
def test_bytes_are_those_of_the_reference(case: str, kind: str) -> None:
    settings = dict(CASES[case])
    x = drawn(kind)
    rotated = settings.pop("with_rht", False)
    blocks = settings.get("with_2d_quantization", False)
    quantizer = NVFP4Quantizer(with_rht=rotated, with_post_rht_amax=rotated, **settings)
    found = quantizer(x)
    reference = NVFP4QuantizerRef(
        dtype=Fp4Formats.E2M1,
        rowwise=True,
        columnwise=True,
        quant_tile_shape=(16, 16) if blocks else (1, 16),
        with_rht=rotated,
        **{k: v for k, v in settings.items() if k != "with_2d_quantization"},
    )
    wanted = reference.quantize(x)
    num_rows, num_columns = x.shape
    same("data", found._rowwise_data, wanted.data.view(torch.uint8))
    same("scales", found._rowwise_scale_inv[:num_rows, : num_columns // 16], bits(wanted.scale))
    same("amax", found._amax_rowwise, wanted.global_amax_row)
    same("columns", found._columnwise_data, wanted.data_t.view(torch.uint8))
    column_scales = found._columnwise_scale_inv[:num_columns, : num_rows // 16]
    same("scales of columns", column_scales, bits(wanted.scale_t))
    same("amax of columns", found._amax_columnwise, wanted.global_amax_col)


def bits(scale: torch.Tensor) -> torch.Tensor:
    return scale.view(torch.uint8)


def same(what: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert torch.equal(found, wanted.reshape(found.shape)), what

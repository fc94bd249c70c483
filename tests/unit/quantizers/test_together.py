"""Operands that are quantized together get the bits and the scales of one call for each."""

import pytest
import torch

from megatron_snip.formats import FORMATS, Format
from megatron_snip.quantizers import together
from megatron_snip.quantizers.quantize import (
    operand_block,
    operand_format,
    quantize_dequantize_operand,
    rotated,
)
from megatron_snip.quantizers.reference import amax_of, tile_amaxes, tile_scales
from megatron_snip.quantizers.stochastic import StochasticStream, StreamKey
from megatron_snip.quantizers.together import GemmOperand, quantize_dequantize_operands
from megatron_snip.types import GEMM_OPERANDS, Gemm, Operand
from tests.unit.quantizers.oracle import SCALED

STREAM = StochasticStream(StreamKey(3, "decoder.layers.0.mlp.linear_fc2", 11, 0))
ENTRIES = [(operand, gemm) for gemm, pair in GEMM_OPERANDS.items() for operand in pair]


def matrix(rows: int, cols: int, operand: Operand) -> torch.Tensor:
    generator = torch.Generator().manual_seed(list(Operand).index(operand))
    x = torch.randn(rows, cols, generator=generator)
    x[: rows // 4] *= 1e-4
    return x.bfloat16() if operand is Operand.INPUT else x


@pytest.mark.parametrize("fmt", SCALED, ids=lambda f: f.name)
@pytest.mark.parametrize("shape", [(128, 256), (256, 128), (130, 200), (0, 128)])
@pytest.mark.parametrize("small", [1 << 16, 1000])
def test_together_or_alone_gives_the_same_bits(
    fmt: Format, shape: tuple[int, int], small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every operand of every GEMM, in complete tiles and others, in one buffer and without."""
    monkeypatch.setattr(together, "SMALL", small)
    entries: list[GemmOperand] = []
    alone: list[torch.Tensor] = []
    for operand, gemm in ENTRIES:
        x = matrix(*shape, operand)
        number = 1.5 * amax_of(x) + 1e-3  # of a larger tensor, or a delayed scale
        source = rotated(x, fmt, gemm)
        amaxes = tile_amaxes(source, operand_block(fmt, operand, gemm))
        entries.append(GemmOperand(source, operand, gemm, amaxes, STREAM, number))
        alone.append(
            quantize_dequantize_operand(
                x, fmt, operand, gemm, stream=STREAM, amax_or_scale=number, dtype=torch.float32
            )
        )
    found = quantize_dequantize_operands(entries, fmt)
    for entry, wanted, (values, decode) in zip(entries, alone, found, strict=True):
        assert torch.equal(values, wanted)
        _, scale = tile_scales(
            entry.amaxes, operand_format(fmt, entry.operand), entry.amax_or_scale
        )
        assert torch.equal(decode, scale)


def test_a_tensor_with_nan_leaves_the_others_alone() -> None:
    good = matrix(128, 256, Operand.GRAD_OUTPUT)
    bad = good.clone()
    bad[5, 7] = torch.nan

    def entry(x: torch.Tensor) -> GemmOperand:
        amaxes = tile_amaxes(x, (1, 16))
        return GemmOperand(x, Operand.INPUT, Gemm.FPROP, amaxes, amax_or_scale=amax_of(x))

    fmt = FORMATS["nvfp4"]
    (wanted,) = quantize_dequantize_operands([entry(good)], fmt)
    first, second = quantize_dequantize_operands([entry(bad), entry(good)], fmt)
    assert first.values.isnan().all()
    assert torch.equal(second.values, wanted.values)


def test_stochastic_rounding_without_a_stream_is_refused() -> None:
    x = matrix(128, 128, Operand.GRAD_OUTPUT)
    entry = GemmOperand(x, Operand.GRAD_OUTPUT, Gemm.DGRAD, tile_amaxes(x, (1, 128)))
    with pytest.raises(ValueError, match="needs a stream"):
        quantize_dequantize_operands([entry], FORMATS["fp4"])

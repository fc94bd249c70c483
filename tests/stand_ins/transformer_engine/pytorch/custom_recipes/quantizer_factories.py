"""One factory a built-in recipe."""

from transformer_engine.pytorch.quantization import QuantizerRole
from transformer_engine.pytorch.quantizers import (
    Float8BlockQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)


def high_precision_factory(role: QuantizerRole | None) -> IdentityQuantizer:
    return IdentityQuantizer()


def float8_block_scaling_factory(role: QuantizerRole | None) -> Float8BlockQuantizer:
    return Float8BlockQuantizer()


def mxfp8_factory(role: QuantizerRole | None) -> MXFP8Quantizer:
    return MXFP8Quantizer()


def nvfp4_factory(role: QuantizerRole | None) -> NVFP4Quantizer:
    return NVFP4Quantizer()

"""One factory a built-in recipe."""

from typing import Any

from transformer_engine.pytorch.quantizers import (
    Float8BlockQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)


def _factory(quantizer: Any) -> Any:
    return lambda role: quantizer()


high_precision_factory = _factory(IdentityQuantizer)
float8_block_scaling_factory = _factory(Float8BlockQuantizer)
mxfp8_factory = _factory(MXFP8Quantizer)
nvfp4_factory = _factory(NVFP4Quantizer)

"""Quantizers: what a GEMM sees of an operand in a low-precision format.

`quantize` is the entry: on CUDA it runs Triton kernels, elsewhere the PyTorch reference, which is
also the specification. Both give the same bits.
"""

from megatron_snip.quantizers.error_norms import error_norms
from megatron_snip.quantizers.quantize import (
    is_stochastic,
    needs_tensor_amax,
    operand_block,
    quantize_dequantize,
    quantize_dequantize_operand,
    quantize_dequantize_pair,
    rotated,
)
from megatron_snip.quantizers.stochastic import (
    ColumnMap,
    StochasticStream,
    StreamKey,
    grad_output_stream,
)

__all__ = [
    "quantize_dequantize",
    "quantize_dequantize_operand",
    "quantize_dequantize_pair",
    "operand_block",
    "is_stochastic",
    "needs_tensor_amax",
    "rotated",
    "error_norms",
    "grad_output_stream",
    "StochasticStream",
    "StreamKey",
    "ColumnMap",
]

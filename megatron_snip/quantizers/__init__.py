"""Reference quantizers: the plain PyTorch specification of every format, and the CPU path.

Entry points: `quantize_dequantize_operand` and `quantize_operand` for a GEMM's operand,
`quantize` and `quantize_dequantize` for a tensor with given tiles.
"""

from megatron_snip.quantizers.hadamard import HadamardTransform
from megatron_snip.quantizers.operand import (
    Rounding,
    is_stochastic,
    needs_tensor_amax,
    operand_block,
    quantize_dequantize_operand,
    quantize_operand,
)
from megatron_snip.quantizers.reference import QuantizedTensor, quantize, quantize_dequantize
from megatron_snip.quantizers.stream import StochasticStream, StreamKey, StreamLayout

__all__ = [
    "quantize_dequantize_operand",
    "quantize_operand",
    "quantize_dequantize",
    "quantize",
    "QuantizedTensor",
    "Rounding",
    "StochasticStream",
    "StreamKey",
    "StreamLayout",
    "HadamardTransform",
    "operand_block",
    "is_stochastic",
    "needs_tensor_amax",
]

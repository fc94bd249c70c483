"""Quantizers: the plain PyTorch specification of every format, which is also the CPU path.

Entry points: `quantize_dequantize_operand` and `quantize_operand` for a GEMM's operand
(`..._pair`: for two GEMMs at once),
`quantize` and `quantize_dequantize` for a tensor with given tiles, `quantize_payload` for the
bytes a native GEMM takes, `..._both` for two quantizations of one read, `error_norms` and
`moments` for sums. On CUDA they run Triton kernels, elsewhere the PyTorch reference in this room;
the two agree bit for bit.
"""

from megatron_snip.quantizers.hadamard import HadamardTransform
from megatron_snip.quantizers.norms import error_norms, moments
from megatron_snip.quantizers.operand import (
    Rounding,
    is_stochastic,
    needs_tensor_amax,
    operand_block,
    quantize_dequantize_operand,
    quantize_operand,
    rotated,
)
from megatron_snip.quantizers.pair import (
    quantize_dequantize_pair,
    quantize_payload_operand,
    quantize_payload_pair,
)
from megatron_snip.quantizers.reference import QuantizedTensor
from megatron_snip.quantizers.routes import (
    Payload,
    quantize,
    quantize_dequantize,
    quantize_dequantize_both,
    quantize_payload,
    quantize_payload_both,
)
from megatron_snip.quantizers.stream import StochasticStream, StreamKey, StreamLayout

__all__ = [
    "quantize_dequantize_operand",
    "quantize_operand",
    "quantize_payload_operand",
    "quantize_dequantize_pair",
    "quantize_payload_pair",
    "quantize_dequantize",
    "quantize",
    "quantize_payload",
    "quantize_dequantize_both",
    "quantize_payload_both",
    "error_norms",
    "moments",
    "QuantizedTensor",
    "Payload",
    "Rounding",
    "StochasticStream",
    "StreamKey",
    "StreamLayout",
    "HadamardTransform",
    "operand_block",
    "is_stochastic",
    "needs_tensor_amax",
    "rotated",
]

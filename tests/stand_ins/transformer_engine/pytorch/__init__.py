from transformer_engine.pytorch import distributed, fp8, ops, quantization
from transformer_engine.pytorch.attention_core import DotProductAttention
from transformer_engine.pytorch.linears import GroupedLinear, LayerNormLinear, Linear
from transformer_engine.pytorch.norms import LayerNorm, RMSNorm
from transformer_engine.pytorch.padding import Fp8Padding, Fp8Unpadding
from transformer_engine.pytorch.quantization import fp8_autocast, fp8_model_init

__all__ = [
    "DotProductAttention",
    "Fp8Padding",
    "Fp8Unpadding",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "Linear",
    "RMSNorm",
    "distributed",
    "ops",
    "fp8",
    "fp8_autocast",
    "fp8_model_init",
    "quantization",
]

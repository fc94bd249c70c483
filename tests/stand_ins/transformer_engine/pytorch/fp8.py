"""Where Megatron imports the autocast from."""

from transformer_engine.pytorch.quantization import (
    FP8GlobalStateManager,
    fp8_autocast,
    fp8_model_init,
)

__all__ = ["FP8GlobalStateManager", "fp8_autocast", "fp8_model_init"]

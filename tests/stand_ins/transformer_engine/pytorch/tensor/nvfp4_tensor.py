from transformer_engine.pytorch.quantizers import NVFP4Quantizer

__all__ = ["NVFP4Quantizer"]

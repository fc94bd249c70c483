from transformer_engine.pytorch.quantizers import HybridQuantizer

__all__ = ["HybridQuantizer"]

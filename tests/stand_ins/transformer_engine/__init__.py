"""A stand-in for Transformer Engine 2.20.2 on a CPU; see tests/stand_ins/README.md."""

from transformer_engine import common, pytorch

__version__ = "2.20.2"
__all__ = ["common", "pytorch"]

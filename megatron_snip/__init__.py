"""megatron-snip: adaptive per-linear precision (SNIP, arXiv:2602.01410) for Megatron-LM.

Importing this package is cheap and changes nothing. Each subpackage imports torch, Megatron or
OR-Tools where it needs them, and Megatron is patched only on request.
"""

from pathlib import Path

from megatron_snip.version import __version__

__all__ = ["__version__"]

# Builds put kernels/ and patches/ into this package. In a checkout they lie beside it.
_HERE = Path(__file__).resolve().parent
if not (_HERE / "patches").is_dir():
    __path__.append(str(_HERE.parent))

"""megatron-snip: adaptive per-linear precision (SNIP, arXiv:2602.01410) for Megatron-LM.

Importing this package is cheap and changes nothing: torch, Megatron and OR-Tools are imported
by the rooms that need them, and Megatron is patched only when asked for.
"""

from megatron_snip.version import __version__

__all__ = ["__version__"]

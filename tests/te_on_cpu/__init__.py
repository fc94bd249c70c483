"""Transformer Engine's own Python on a CPU: only its compiled extension is replaced.

    from tests import te_on_cpu
    te_on_cpu.install()         # before Megatron is imported; a Blackwell GPU is claimed
    import transformer_engine.pytorch as te

    extension/    `transformer_engine_torch` in PyTorch
    importing.py  Transformer Engine's modules are found, and load that extension
    probe.py      which formats the GEMMs of a module multiplied

Transformer Engine is not in site-packages, where its Python without an extension would end every
import of Megatron: `make install` unpacks its releases into .venv/te/. What runs here is its
control flow, its communication and its choice of operands; no kernel, no stream, no speed.
"""

from tests.te_on_cpu.importing import RELEASES, install

__all__ = ["RELEASES", "install"]

"""Patches on Megatron: installed only on request, checked by signature, reversible."""

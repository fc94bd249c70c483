"""Patches on Megatron: installed only on request, checked by signature, reversible.

setup.py installs this folder as `megatron_snip.patches`.
"""

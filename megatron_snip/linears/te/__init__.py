"""Transformer Engine's linears: recipes per module, set between iterations."""

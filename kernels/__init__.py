"""Triton kernels: the quantizers on a GPU, bit for bit as `megatron_snip.quantizers` defines them.

`dispatch` says whether they run for a tensor, and why; it does not import Triton. `launch` holds
the functions that run them; importing it imports Triton. Callers use `megatron_snip.quantizers`,
which asks `dispatch` first.
"""

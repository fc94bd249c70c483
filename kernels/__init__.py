"""Triton kernels: the quantizers on a GPU, bit for bit as `megatron_snip.quantizers` defines them.

`launch` decides whether the kernels can run for a tensor, and runs them. It imports Triton only
when a kernel runs. Callers use `megatron_snip.quantizers`.
"""

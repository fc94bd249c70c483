"""Quantizers: what a GEMM sees of an operand in a low-precision format.

`quantize` is the entry: on CUDA it runs Triton kernels, elsewhere the PyTorch reference, which is
also the specification. Both give the same bits.
"""

"""Quantizers: what a GEMM sees of an operand in a low-precision format.

`quantize` is the entry: it runs Triton kernels on CUDA and the PyTorch reference on other devices.
The reference is also the specification. Both give the same bits.
"""

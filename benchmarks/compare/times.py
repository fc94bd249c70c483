"""Predicted time of a model's linears against the share of low-precision FLOPs; none is measured.

A GEMM takes the longer of its FLOPs at the peak rate of its format and its bytes at the bandwidth
of the memory (a roofline). A GEMM below BF16 also waits for its operands' quantization: each is
read in BF16 and written in the format. The kernel is not fused with what comes before it, which is
the slow case. Communication, norms and attention are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

BITS = {"bf16": 16, "fp8": 8, "fp4": 4.5}
"""Of an element with its scales; NVFP4 has eight bits for 16 elements."""


@dataclass(frozen=True)
class Gpu:
    """What a prediction knows of a GPU, from NVIDIA's data sheets, without sparsity.

    Attributes:
        name: of the GPU.
        high: the format of the FLOPs that are not in the low format.
        low: the low format.
        flops: FLOPs in a second, by format.
        bandwidth: bytes in a second of its memory.
    """

    name: str
    high: str
    low: str
    flops: dict[str, float]
    bandwidth: float


GPUS = (
    Gpu("H100 SXM", "bf16", "fp8", {"bf16": 989e12, "fp8": 1979e12}, 3.35e12),
    Gpu("B200", "fp8", "fp4", {"bf16": 2.25e15, "fp8": 4.5e15, "fp4": 9e15}, 8.0e12),
)

TOKENS = 8192
"""Of a microbatch on one GPU."""

SHAPES = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))
"""(in_features, out_features) of a layer of Llama 3 8B: qkv, proj, gated fc1, fc2."""


def linears_seconds(gpu: Gpu, fmt: str) -> float:
    """Return the predicted seconds of a layer's GEMMs, all in one format."""
    total = 0.0
    for in_features, out_features in SHAPES:
        x = TOKENS * in_features
        w = in_features * out_features
        g = TOKENS * out_features
        # Operands and output of fprop, dgrad and wgrad; outputs are in BF16.
        for first, second, output in ((x, w, g), (g, w, x), (g, x, w)):
            read = (first + second) * BITS[fmt] / 8
            compute = 2.0 * TOKENS * w / gpu.flops[fmt]
            total += max(compute, (read + 2 * output) / gpu.bandwidth)
            if fmt != "bf16":
                total += (2 * (first + second) + read) / gpu.bandwidth
    return total


def seconds(gpu: Gpu, share: float) -> float:
    """Return the predicted seconds of a layer's GEMMs with a share of their FLOPs low.

    Args:
        gpu: with its two formats.
        share: between 0 and 1; the low GEMMs are spread evenly over the shapes.
    """
    high = linears_seconds(gpu, gpu.high)
    low = linears_seconds(gpu, gpu.low)
    return high + share * (low - high)


def percent_saved(gpu: Gpu, share: float, more: float) -> float:
    """Return by how many percent the linears are faster with `more` percent more low FLOPs.

    Args:
        gpu: with its two formats.
        share: of low FLOPs without the additional ones.
        more: percent of `share`; together they count as 1 at most.
    """
    longer = min(1.0, share * (1 + more / 100))
    return 100 * (1 - seconds(gpu, longer) / seconds(gpu, share))

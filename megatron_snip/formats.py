"""The table of number formats a GEMM operand can take.

A scaled format stores x as q * s: q on the grid of a small float (the element type), s one scale
per tile. Activations and output gradients use 1 x `tile` tiles along the GEMM's contraction
dimension, weights `weight_block` = (rows, cols along the contraction) blocks.

Sources: SNIP, arXiv:2602.01410 (fp8, fp4: 1x128 tiles, 128x128 blocks, FP32 scales);
OCP Microscaling Formats (MX) v1.0 (mxfp8, mxfp4: 1x32, E8M0); NVIDIA, arXiv:2509.25149
(nvfp4: 1x16, E4M3 scales under one FP32 scale per tensor; nvfp4_2d_rht: its recipe for
pretraining); Transformer Engine 2.20 (fp8_tensorwise: current scaling; fp8_blockwise;
`_hybrid`: E5M2 gradients). `fp3` is a 3-bit format (E2M0: 0, 1, 2, 4) for
experiments; no hardware has it.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

from megatron_snip.errors import UsageError, did_you_mean, shortened

Block = tuple[int, int]
"""(rows, cols) of a tile in the tensor's own two dims."""


class ScaleType(StrEnum):
    """How a tile's scale is stored."""

    FP32 = "fp32"
    E8M0 = "e8m0"
    """A power of two, 2^-127 .. 2^127 (OCP MX)."""
    E4M3 = "e4m3"
    """An FP8 number, itself scaled by one FP32 number per tensor (NVFP4)."""
    E4M3_TE = "e4m3 te"
    """The same in Transformer Engine's arithmetic, with subnormal scales too."""
    TENSOR = "tensor"
    """One FP32 number for all elements, from their largest magnitude (current scaling)."""
    DELAYED = "delayed"
    """One FP32 number for all elements, from the largest magnitudes of earlier tensors."""


@dataclass(frozen=True)
class ElementType:
    """A small float: sign, exponent with `min_exponent` as the least normal one, mantissa.

    Attributes:
        name: The field's name for it, such as `e4m3`.
        mantissa_bits: Stored mantissa bits; the step in [2^e, 2^(e+1)) is 2^(e - mantissa_bits).
        min_exponent: Exponent of the smallest normal number; below it the step stays constant.
        max_value: The largest finite magnitude; magnitudes beyond it saturate.
    """

    name: str
    mantissa_bits: int
    min_exponent: int
    max_value: float

    @property
    def least_amax(self) -> float:
        """The smallest largest magnitude that a scale is made for.

        Above it every scale, its inverse and every product is a normal FP32 number, of the
        smallest step too: least_amax / max_value * 2^(min_exponent - mantissa_bits) >= 2^-126.
        """
        return 2.0**-94 if self.max_value > 1024.0 else 2.0**-100


E4M3 = ElementType("e4m3", mantissa_bits=3, min_exponent=-6, max_value=448.0)
E5M2 = ElementType("e5m2", mantissa_bits=2, min_exponent=-14, max_value=57344.0)
E2M1 = ElementType("e2m1", mantissa_bits=1, min_exponent=0, max_value=6.0)
E2M0 = ElementType("e2m0", mantissa_bits=0, min_exponent=0, max_value=4.0)


@dataclass(frozen=True)
class Format:
    """One row of the table.

    Attributes:
        name: The name that users write in `--snip-formats`.
        bits: Bits per element, without scales; the fewest is the "lowest precision".
        element: The element type, or None for bf16 (no quantization).
        tile: Number of elements along the contraction dimension that share a scale. Where a tensor
            has one scale, `tile` and `weight_block` only divide the work.
        weight_block: (rows, cols along the contraction) that share a scale in a weight.
        scale: How that scale is stored.
        stochastic_grad: Whether grad_output is rounded stochastically.
        wgrad_hadamard: Number of tokens that a random Hadamard transform mixes before wgrad's
            operands are quantized, a power of two; 0 for no transform.
        grad_element: The element type of grad_output, where it is another one.
    """

    name: str
    bits: int
    element: ElementType | None = None
    tile: int = 128
    weight_block: Block = (128, 128)
    scale: ScaleType = ScaleType.FP32
    stochastic_grad: bool = False
    wgrad_hadamard: int = 0
    grad_element: ElementType | None = None

    def __hash__(self) -> int:
        # Formats are looked up in tables for every operand; a hash of all fields takes longer.
        return hash(self.name)

    @property
    def quantized(self) -> bool:
        """Whether tensors change at all in this format."""
        return self.element is not None

    @property
    def has_tensor_scale(self) -> bool:
        """Whether one number scales the entire tensor."""
        return self.scale in (ScaleType.TENSOR, ScaleType.DELAYED)

    @property
    def needs_amax_or_scale(self) -> bool:
        """Whether scales need a number of the entire tensor: its largest magnitude or its scale."""
        return self.has_tensor_scale or self.scale in (ScaleType.E4M3, ScaleType.E4M3_TE)

    def hybrid(self) -> Self:
        """Return the format with E5M2 gradients: more range and less precision than E4M3."""
        return replace(self, name=f"{self.name}_hybrid", grad_element=E5M2)


_MXFP8 = Format("mxfp8", 8, E4M3, tile=32, weight_block=(1, 32), scale=ScaleType.E8M0)
_NVFP4 = Format(
    "nvfp4",
    4,
    E2M1,
    tile=16,
    weight_block=(1, 16),
    scale=ScaleType.E4M3,
    stochastic_grad=True,
)
_TENSORWISE = Format("fp8_tensorwise", 8, E4M3, scale=ScaleType.TENSOR)
_BLOCKWISE = Format("fp8_blockwise", 8, E4M3, scale=ScaleType.E8M0)

FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("bf16", 16),
        Format("fp8", 8, E4M3),
        Format("fp4", 4, E2M1, stochastic_grad=True),
        _MXFP8,
        replace(_MXFP8, name="mxfp4", bits=4, element=E2M1, stochastic_grad=True),
        _NVFP4,
        _TENSORWISE,
        _TENSORWISE.hybrid(),
        _BLOCKWISE,
        _BLOCKWISE.hybrid(),
        _MXFP8.hybrid(),
        replace(
            _NVFP4,
            name="nvfp4_2d_rht",
            weight_block=(16, 16),
            scale=ScaleType.E4M3_TE,
            wgrad_hadamard=16,
        ),
        Format("fp3", 3, E2M0, stochastic_grad=True),
    )
}
"""Every format by name. Adding one is a line here and its test; names have no dash."""

DELAYED = replace(_TENSORWISE, name="fp8_delayed", scale=ScaleType.DELAYED)
"""How `fp8` is measured in a job of Transformer Engine's delayed scaling. No plan can name it: the
scales come from the history of the job's own linears."""


def get_format(name: str) -> Format:
    """Return the format called `name`.

    Raises:
        UsageError: if there is none; the message lists the known ones.
    """
    if name in (DELAYED.name, DELAYED.hybrid().name):
        raise UsageError(
            f"'{name}' is no longer simulated; run the job in Transformer Engine's delayed scaling "
            "(--fp8-format and --fp8-recipe delayed), and name fp8"
        )
    if name not in FORMATS:
        near = did_you_mean(name, FORMATS)
        text = f"unknown format {shortened(repr(name), 80)}; known: {', '.join(FORMATS)}{near}"
        raise UsageError(text)
    return FORMATS[name]


def lowest_precision(names: tuple[str, ...]) -> Format:
    """Return the format with the fewest bits among `names`, the first of them on a tie.

    Raises:
        UsageError: if `names` is empty or holds an unknown format.
    """
    if not names:
        raise UsageError("no formats given; name at least one, e.g. fp8,fp4")
    return min((get_format(n) for n in names), key=lambda f: f.bits)

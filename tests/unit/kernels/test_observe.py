"""A measured linear by kernels against PyTorch: in Triton's interpreter, or on a GPU.

As in test_bits.py, without a GPU these tests run in a process of their own.
"""

from collections.abc import Sequence

import pytest
import torch

from megatron_snip.formats import DELAYED, FORMATS, Format
from megatron_snip.kernels import launch
from megatron_snip.quantizers.reference import amax_of
from megatron_snip.quantizers.stochastic import ColumnMap, StochasticStream, StreamKey
from megatron_snip.statistics import fused, measure
from megatron_snip.statistics.measure import ERROR_SQUARE, OperandSums
from megatron_snip.statistics.operands import AmaxesOrScales, Operands
from megatron_snip.types import Operand

DEVICE = "cuda" if torch.cuda.is_available() and not launch.interpreting() else "cpu"

if DEVICE == "cpu" and not launch.interpreting():
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

# NumPy on NaN, in the interpreter
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

KEY = StreamKey(5, "decoder.layers.1.mlp.linear_fc1", 3, 1)
DELAYED_HYBRID = DELAYED.hybrid()
MENU = {
    "fp8-fp4": ("fp8", "fp4"),
    "one": ("fp4",),
    "three": ("fp8", "nvfp4", "fp3"),
    "blocks-of-mx": ("mxfp8", "mxfp4"),
    "mixed-blocks": ("fp8", "mxfp4", "mxfp8_hybrid"),
    "tensor-scales": ("fp8_tensorwise", "fp8_tensorwise_hybrid"),
    "delayed": ("fp8_delayed_hybrid", "fp4"),
    "hadamard": ("fp8_blockwise_hybrid", "nvfp4_2d_rht"),
}


def formats_of(names: Sequence[str]) -> dict[str, Format]:
    return {name: FORMATS.get(name, DELAYED_HYBRID) for name in names}


def draw(rows: int, cols: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of different magnitude; some zeros, and some too small for any format."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((rows, cols), generator=generator)
    x *= torch.exp2(torch.randint(-12, 4, (rows, 1), generator=generator))
    x[:, ::17] = 0
    x[:, 5::40] *= 2.0**-30
    return x.to(DEVICE, dtype)


def operands_of(
    formats: dict[str, Format],
    shape: tuple[int, int, int],
    dtype: torch.dtype = torch.bfloat16,
    damage: float | None = None,
) -> Operands:
    """X, W and G of some tokens."""
    tokens, num_inputs, num_outputs = shape
    x = draw(tokens, num_inputs, 1, dtype)
    w = draw(num_outputs, num_inputs, 2, dtype)
    g = draw(tokens, num_outputs, 3, dtype)
    if damage is not None:
        for tensor in (x, w, g):
            tensor[1, 3] = damage
            tensor[-1, -1] = -damage
    delayed = {
        fmt: torch.tensor([30.0, 3e3, 1e4], device=DEVICE)
        for fmt in formats.values()
        if fmt == DELAYED_HYBRID
    }
    known = AmaxesOrScales(torch.stack([amax_of(each) for each in (x, w, g)]), delayed)
    return Operands(x, w, g, known)


def both(
    operands: Operands, formats: dict[str, Format], columns: ColumnMap | None = None
) -> tuple[OperandSums, OperandSums]:
    """Return what PyTorch finds, then what the kernels find."""
    stream = StochasticStream(KEY, columns)
    with torch.inference_mode():
        wanted = measure.operand_sums(operands, formats, stream)
        return wanted, fused.operand_sums(operands, formats, stream)


def assert_equal(pair: tuple[OperandSums, OperandSums]) -> None:
    """Counts, bins and amaxes are equal; sums of squares are close."""
    wanted, found = pair
    assert found.sums.dtype == wanted.sums.dtype == torch.float64
    torch.testing.assert_close(found.amax, wanted.amax, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(
        found.sums[..., ERROR_SQUARE],
        wanted.sums[..., ERROR_SQUARE],
        rtol=2e-6,
        atol=0,
        equal_nan=True,
    )
    assert torch.equal(found.sums[..., 1:], wanted.sums[..., 1:])


@pytest.mark.parametrize("names", MENU.values(), ids=MENU)
def test_formats(names: tuple[str, ...]) -> None:
    formats = formats_of(names)
    assert_equal(both(operands_of(formats, (40, 150, 136)), formats))


@pytest.mark.parametrize("shape", [(32, 128, 256), (3, 17, 33), (129, 64, 130)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_ragged_shapes(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    formats = formats_of(MENU["fp8-fp4"])
    assert_equal(both(operands_of(formats, shape, dtype), formats))


@pytest.mark.parametrize("damage", [float("nan"), float("inf")])
@pytest.mark.parametrize("menu", ["fp8-fp4", "mixed-blocks", "tensor-scales"])
def test_what_is_not_finite(damage: float, menu: str) -> None:
    formats = formats_of(MENU[menu])
    assert_equal(both(operands_of(formats, (24, 140, 130), damage=damage), formats))


def test_a_shard_draws_its_part_of_the_random_numbers() -> None:
    formats = formats_of(MENU["fp8-fp4"])
    operands = operands_of(formats, (40, 128, 256))
    assert_equal(both(operands, formats, ColumnMap.shard(256, 1, 2)))


def test_operands_without_rows_and_a_weight_that_is_not_measured_add_nothing() -> None:
    """Experts without tokens, shards without sampled rows of W, and later microbatches."""
    formats = formats_of(MENU["fp8-fp4"])
    operands = operands_of(formats, (40, 128, 256))
    assert operands.weight is not None
    without = operands._replace(weight=None)
    empty = Operands(operands.input[:0], operands.weight[:0], operands.grad_output[:0])
    for each in (without, empty):
        pair = both(each, formats)
        assert_equal(pair)
        place = list(Operand).index(Operand.WEIGHT)
        assert not pair[1].sums[place].any()
    assert not pair[1].sums.any() and not pair[1].amax.any()


def test_the_same_bits_again() -> None:
    formats = formats_of(MENU["fp8-fp4"])
    operands = operands_of(formats, (40, 150, 136))
    (_, first), (_, second) = both(operands, formats), both(operands, formats)
    assert torch.equal(first.sums, second.sums) and torch.equal(first.amax, second.amax)

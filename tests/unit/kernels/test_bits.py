"""Kernels against the PyTorch reference, bit for bit: in Triton's interpreter, or on a GPU.

The interpreter must be chosen before Triton is imported, so without a GPU these tests run in a
process of their own (`test_choose.py`) and are skipped otherwise.
"""

from unittest.mock import patch

import pytest
import torch

from megatron_snip.formats import FORMATS
from megatron_snip.kernels import launch
from megatron_snip.linears.te.recipe_table import RECIPES
from megatron_snip.quantizers.quantize import (
    philox_arguments,
    quantize_dequantize,
    quantize_dequantize_pair,
)
from megatron_snip.quantizers.stochastic import ColumnMap, StochasticStream, StreamKey
from megatron_snip.types import Operand
from tests.unit.quantizers.oracle import SCALED

DEVICE = "cuda" if torch.cuda.is_available() and not launch.interpreting() else "cpu"

if DEVICE == "cpu" and not launch.interpreting():
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

# NumPy on NaN, in the interpreter
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

KEY = StreamKey(5, "decoder.layers.1.mlp.linear_fc1", 3, 1)
STREAM = StochasticStream(KEY)
CASES = [
    # The rotation is not the kernels', so these two are fp4 and nvfp4 again.
    *(f for f in SCALED if f.name not in ("fp4-hadamard", "nvfp4-hadamard")),
    RECIPES["delayed"].quantization,  # its scale is given, in the place of an amax
]


def sample(rows: int, cols: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows of very different magnitude; zero, NaN and Inf tiles; zeros of both signs."""
    torch.manual_seed(rows * cols)
    x = torch.randn(rows, cols) * torch.exp2(torch.randint(-25, 25, (rows, 1)))
    x[rows // 2 :, : cols // 3] = 0
    x[:, -1] = -0.0
    x[0, 0] = 1e-42
    if rows > 8:
        x[1, cols // 2], x[rows - 1, 0] = float("nan"), -float("inf")
    return x.to(dtype).to(DEVICE)


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bits of x, all NaN alike."""
    wide = x.float()
    return torch.where(wide.isnan(), float("nan"), wide).cpu().contiguous().view(torch.int32)


def both_paths(function, *args, **options):
    """(reference result, kernel result)."""
    results = []
    for kernels in (False, True):
        with patch.object(launch, "use_kernels", lambda *_, answer=kernels: answer):
            results.append(function(*args, **options))
    return results


def agree(function, *args, **options) -> None:
    """Both paths give the same shapes, dtypes and bits."""
    wanted, got = both_paths(function, *args, **options)
    pairs = [(wanted, got)] if isinstance(got, torch.Tensor) else zip(wanted, got, strict=True)
    for a, b in pairs:
        assert a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


@pytest.mark.parametrize("fmt", CASES, ids=lambda f: f.name)
@pytest.mark.parametrize("stream", [None, STREAM], ids=["nearest", "stochastic"])
def test_every_format_and_direction(fmt, stream):
    x = sample(40, 136)
    amax = torch.tensor(1e7, device=DEVICE)  # x holds NaN, which would make all of nvfp4 NaN
    options = {"stream": stream, "amax_or_scale": amax}
    for block in {(1, fmt.tile), (fmt.tile, 1), fmt.weight_block}:
        agree(quantize_dequantize, x, fmt, block, **options)
        agree(quantize_dequantize, x.bfloat16(), fmt, block, dtype=torch.bfloat16, **options)


@pytest.mark.parametrize("block", [(1, 128), (128, 1), (128, 128)])
def test_ragged_empty_and_strided_matrices(block):
    base = sample(70, 150)
    ragged = [sample(*shape) for shape in ((1, 1), (3, 257), (129, 65))]
    empty = [torch.empty(shape, device=DEVICE) for shape in ((0, 128), (5, 0))]
    strided = [base.T, base[::2, 1:], base[:, ::3], base[:1].expand(20, -1)]
    for x in ragged + empty + strided:
        for stream in (None, STREAM):
            agree(quantize_dequantize, x, FORMATS["fp4"], block, stream=stream)


@pytest.mark.parametrize(
    ("columns", "cols"),
    [
        (ColumnMap(512, 128, 512, 128), 128),
        (ColumnMap.shard(256, 1, 2, num_chunks=2), 256),
        (ColumnMap(70, 64, 70, 3), 64),
        (ColumnMap.shard(20, 1, 2, num_chunks=2), 20),
        (ColumnMap(2**33, 64, 2**33, 2**32), 64),
    ],
    ids=["shard", "gated", "unaligned", "unaligned-gated", "beyond-32-bits"],
)
def test_streams_of_sharded_tensors(columns, cols):
    x = torch.randn(33, cols, device=DEVICE)
    for block in ((1, 64), (64, 1)):
        agree(quantize_dequantize, x, FORMATS["fp4"], block, stream=StochasticStream(KEY, columns))


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("cols", [64, 20])
@pytest.mark.parametrize("first_row", [33, 2**31 // 20, 2**31 - 1])
def test_streams_of_a_part_of_the_rows(is_sharded, cols, first_row):
    x = torch.randn(33, cols, device=DEVICE)
    columns = ColumnMap.shard(cols, 1, 2) if is_sharded else None
    stream = StochasticStream(KEY, columns, first_row)
    for block in ((1, 64), (64, 1)):
        agree(quantize_dequantize, x, FORMATS["fp4"], block, stream=stream)


def test_results_do_not_depend_on_the_launch():
    x = torch.randn(70, 200, device=DEVICE)
    quantization = FORMATS["fp4"], (1, 32), philox_arguments(STREAM, 200)
    first, *others = (
        launch.quantize_dequantize(
            x, *quantization, dtype=torch.float32, config=launch.LaunchConfig(*shape)
        )
        for shape in ((32, 128, 4), (8, 32, 1), (64, 256, 8))
    )
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize(
    "names", [("fp8", "fp8"), ("fp4", "fp4"), ("fp8", "fp4"), ("mxfp8", "nvfp4")], ids="-".join
)
@pytest.mark.parametrize("operand", [Operand.INPUT, Operand.GRAD_OUTPUT], ids=str)
def test_both_copies_of_an_operand(names, operand):
    x = sample(150, 140, torch.bfloat16).view(3, 50, 140)
    agree(quantize_dequantize_pair, x, names, operand, stream=STREAM)


def test_only_the_kernels_draw_their_random_numbers():
    x = torch.randn(33, 64, device=DEVICE)
    names = "fp4", "fp4"
    draws = patch.object(StochasticStream, "draw", side_effect=AssertionError)
    with patch.object(launch, "use_kernels", lambda *_: True), draws:
        quantize_dequantize_pair(x, names, Operand.GRAD_OUTPUT, stream=STREAM)


def test_the_tensors_own_amax_is_used_where_none_is_given():
    agree(quantize_dequantize, torch.randn(20, 64, device=DEVICE), FORMATS["nvfp4"], (1, 16))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_more_than_two_to_the_31_elements():
    x = torch.zeros((2**16 + 1, 2**15 + 128), dtype=torch.bfloat16, device=DEVICE)
    x[-1] = torch.randn(x.shape[1], device=DEVICE)
    out = quantize_dequantize(x, FORMATS["fp8"], (1, 128), dtype=torch.bfloat16)
    wanted = quantize_dequantize(x[-1:].clone(), FORMATS["fp8"], (1, 128), dtype=torch.bfloat16)
    assert torch.equal(out[-1:], wanted) and not out[:-1].any()

"""Kernels against the PyTorch reference, bit for bit: in Triton's interpreter, or on a GPU.

The interpreter must be chosen before Triton is imported, so without a GPU these tests run in a
process of their own (`test_interpreter.py`) and are skipped elsewhere.
"""

import itertools
from dataclasses import replace

import pytest
import torch

from megatron_snip.formats import FORMATS, ScaleType
from megatron_snip.kernels import dispatch
from megatron_snip.quantizers import (
    Payload,
    QuantizedTensor,
    StochasticStream,
    StreamKey,
    StreamLayout,
    error_norms,
    moments,
    quantize,
    quantize_dequantize,
    quantize_dequantize_both,
    quantize_payload,
    quantize_payload_both,
)

DEVICE = "cuda" if torch.cuda.is_available() and not dispatch.interpreting() else "cpu"

if DEVICE == "cpu" and not dispatch.interpreting():
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

# NumPy on NaN, in the interpreter
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SCALED = [f for f in FORMATS.values() if f.quantized]
KEY = StreamKey(5, "decoder.layers.1.mlp.linear_fc1", 3, 1, "grad_output.dgrad")
STREAM = StochasticStream(KEY)
OTHER = StochasticStream(replace(KEY, role="grad_output.wgrad"))


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
    if not x.is_floating_point():
        return x
    wide = x.float()
    return torch.where(wide.isnan(), float("nan"), wide).cpu().contiguous().view(torch.int32)


def both_paths(function, *args, **options):
    """(reference result, kernel result)."""
    results = []
    for path in (dispatch.Path.REFERENCE, dispatch.Path.TRITON):
        with dispatch.forced(path):
            results.append(function(*args, **options))
    return results


def tensors(result) -> list[torch.Tensor]:
    """What a result consists of, in order."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, Payload):
        return [result.codes, result.scales]
    if isinstance(result, QuantizedTensor):
        return [result.values, result.scales]
    return [tensor for part in result for tensor in tensors(part)]


def agree(function, *args, **options) -> None:
    """Both paths give the same shapes, layouts and bits."""
    reference, kernel = (tensors(r) for r in both_paths(function, *args, **options))
    for wanted, got in zip(reference, kernel, strict=True):
        assert wanted.shape == got.shape and wanted.dtype == got.dtype
        for size, stride, other in zip(wanted.shape, wanted.stride(), got.stride(), strict=True):
            assert stride == other or size < 2 or not wanted.numel()
        assert torch.equal(bits(wanted), bits(got))


@pytest.mark.parametrize("fmt", SCALED, ids=lambda f: f.name)
@pytest.mark.parametrize("stream", [None, STREAM], ids=["nearest", "stochastic"])
def test_payloads_and_outputs_in_every_format_and_direction(fmt, stream):
    x = sample(40, 136)
    amax = torch.tensor(1e7, device=DEVICE)  # x holds NaN, which would poison nvfp4 whole
    options = {"stream": stream, "tensor_amax": amax}
    for block in {(1, fmt.tile), (fmt.tile, 1), fmt.weight_block}:
        agree(quantize_payload, x.bfloat16(), fmt, block, **options)
        agree(quantize_dequantize, x, fmt, block, **options)
        agree(quantize_dequantize, x, fmt, block, dtype=torch.bfloat16, **options)


@pytest.mark.parametrize("shape", [(1, 1), (3, 257), (129, 65), (130, 128)])
@pytest.mark.parametrize("block", [(1, 128), (128, 1), (128, 128)])
def test_ragged_shapes(shape, block):
    x = sample(*shape)
    for stream in (None, STREAM):
        agree(quantize_payload, x, FORMATS["fp4"], block, stream=stream)


@pytest.mark.parametrize("block", [(1, 128), (128, 1)])
def test_strided_input(block):
    base = sample(70, 150)
    for x in (base.T, base[::2, 1:], base[:, ::3], base[:1].expand(20, -1)):
        agree(quantize_dequantize, x, FORMATS["fp8"], block)


@pytest.mark.parametrize(("transpose", "scales_col_major"), [(False, True), (True, False)])
def test_payload_layouts(transpose, scales_col_major):
    x = sample(130, 70)
    options = {"transpose": transpose, "scales_col_major": scales_col_major}
    for block in ((1, 16), (16, 1), (128, 128)):
        agree(quantize_payload, x, FORMATS["fp8"], block, **options)


def test_empty_tensors():
    for shape, block in itertools.product([(0, 128), (5, 0), (0, 0)], [(1, 128), (128, 1)]):
        x = torch.empty(shape, device=DEVICE)
        agree(quantize_payload, x, FORMATS["fp4"], block, stream=STREAM)
        agree(quantize_dequantize, x, FORMATS["nvfp4"], block)
        agree(error_norms, x, ((FORMATS["fp8"], block),))
        agree(moments, x)


def test_leading_dims():
    x = sample(30, 72).view(2, 3, 5, 72)
    for block in ((1, 16), (16, 1)):
        agree(quantize_dequantize, x, FORMATS["fp4"], block, stream=STREAM)
        agree(quantize_dequantize, x[:, :0], FORMATS["fp4"], block, stream=STREAM)
        agree(quantize, x, FORMATS["fp8"], block)


@pytest.mark.parametrize(
    ("layout", "cols"),
    [
        (StreamLayout(512, 128, row_start=77), 128),
        (StreamLayout.shard(256, 1, 2, num_chunks=2), 256),
        (StreamLayout(70, 3), 64),
        (StreamLayout.shard(20, 1, 2, num_chunks=2), 20),
        (StreamLayout(2**33, 2**32, row_start=2**25), 64),
    ],
    ids=["shard", "gated", "unaligned", "unaligned-gated", "beyond-32-bits"],
)
def test_streams_of_sharded_tensors(layout, cols):
    x = torch.randn(33, cols, device=DEVICE)
    stream = StochasticStream(KEY, layout)
    for block in ((1, 64), (64, 1)):
        agree(quantize_dequantize, x, FORMATS["fp4"], block, stream=stream)


def test_results_do_not_depend_on_the_launch():
    from megatron_snip.kernels import launch
    from megatron_snip.quantizers.routes import _draws

    x, draws = torch.randn(70, 200, device=DEVICE), _draws(STREAM, 200)
    results = [
        launch.quantize_payload(
            x, FORMATS["fp4"], (1, 32), draws=draws, launch=launch.Launch(*shape)
        )
        for shape in ((32, 128, 4), (8, 32, 1), (64, 256, 8))
    ]
    for codes, scales in results[1:]:
        assert torch.equal(codes, results[0][0]) and torch.equal(scales, results[0][1])


@pytest.mark.parametrize(
    ("names", "streams"),
    [
        (("fp8", "fp8"), (None, None)),
        (("fp4", "fp4"), (STREAM, OTHER)),
        (("fp8", "fp4"), (None, OTHER)),
        (("mxfp8", "nvfp4"), (None, STREAM)),
    ],
)
def test_both_directions_from_one_read(names, streams):
    x = sample(150, 140, torch.bfloat16)
    formats = tuple(FORMATS[name] for name in names)
    blocks = ((1, formats[0].tile), (formats[1].tile, 1))
    amax = torch.tensor(1e7, device=DEVICE)
    options = {"streams": streams, "tensor_amax": amax}
    agree(quantize_payload_both, x, formats, blocks, **options)
    agree(quantize_dequantize_both, x, formats, blocks, dtype=x.dtype, **options)


@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("block", ["row", "tokens", "weight"])
def test_error_norms(rowwise, block):
    shape = (20, 1100) if block == "row" else (150, 300)  # wide enough for several steps
    x = torch.randn(shape, device=DEVICE).bfloat16()
    names = ("fp8", "fp4", "mxfp4", "nvfp4", "mxfp8")  # more than one read serves
    shapes = {
        "row": lambda f: (1, f.tile),
        "tokens": lambda f: (f.tile, 1),
        "weight": lambda f: f.weight_block,
    }
    specs = tuple((FORMATS[name], shapes[block](FORMATS[name])) for name in names)
    reference, kernel = both_paths(error_norms, x, specs, rowwise=rowwise)
    assert kernel.dtype == torch.float64
    # FP32 partial sums in another order, and errors from a fused multiply-add
    torch.testing.assert_close(kernel, reference, rtol=1e-5, atol=0)


def test_norms_carry_nan():
    x = sample(40, 130)
    specs = ((FORMATS["fp8"], (1, 128)),)
    reference, kernel = both_paths(error_norms, x, specs, rowwise=True)
    assert torch.equal(reference.isnan(), kernel.isnan()) and kernel.isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments(dtype):
    x = torch.randn(70, 333, device=DEVICE).to(dtype)
    (amax, square), (kernel_amax, kernel_square) = both_paths(moments, x)
    assert torch.equal(amax, kernel_amax)
    torch.testing.assert_close(square, kernel_square, rtol=1e-6, atol=0)
    x[3, 4] = float("nan")
    assert all(amax.isnan() for amax, _ in both_paths(moments, x))


def test_the_tensors_own_amax_is_used_where_none_is_given():
    x = torch.randn(20, 64, device=DEVICE)
    fmt = FORMATS["nvfp4"]
    assert fmt.scale is ScaleType.E4M3
    agree(quantize_payload, x, fmt, (1, 16))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_more_than_two_to_the_31_elements():
    x = torch.zeros((2**16 + 1, 2**15 + 128), dtype=torch.bfloat16, device=DEVICE)
    x[-1] = torch.randn(x.shape[1], device=DEVICE)
    out = quantize_dequantize(x, FORMATS["fp8"], (1, 128), dtype=torch.bfloat16)
    wanted = quantize_dequantize(x[-1:].clone(), FORMATS["fp8"], (1, 128), dtype=torch.bfloat16)
    assert torch.equal(out[-1:], wanted) and not out[:-1].any()

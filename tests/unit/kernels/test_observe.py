"""A measured linear by kernels against PyTorch: in Triton's interpreter, or on a GPU.

As in test_bits.py, without a GPU these tests run in a process of their own.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_snip import matmul
from megatron_snip.formats import DELAYED, FORMATS, Format
from megatron_snip.kernels import launch
from megatron_snip.quantizers.quantize import rotated_amax
from megatron_snip.quantizers.reference import amax_of
from megatron_snip.quantizers.stochastic import ColumnMap, StochasticStream, StreamKey
from megatron_snip.statistics import fused, measure
from megatron_snip.statistics.measure import NormSums, PartialSums, scalar_names, totals
from megatron_snip.statistics.operands import AmaxesOrScales, MeasuredWeight, Operands
from megatron_snip.statistics.rows import ERROR_SQUARE, SATURATED, ZEROED
from megatron_snip.statistics.sensitivity import Sensitivity

DEVICE = "cuda" if torch.cuda.is_available() and not launch.interpreting() else "cpu"

if DEVICE == "cpu" and not launch.interpreting():
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

# NumPy on NaN, in the interpreter
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

STREAM = StochasticStream(StreamKey(5, "decoder.layers.1.mlp.linear_fc1", 3, 1))
DELAYED_HYBRID = DELAYED.hybrid()
TOLERANCE = 2e-6 if DEVICE == "cpu" else 1e-4  # the GEMMs of a GPU may add in another order
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


@pytest.fixture(autouse=True)
def bf16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU PyTorch, too, multiplies in BF16, and not only what is large."""
    monkeypatch.setattr(matmul, "LARGE_GEMM", 0)


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
    keeps_copies: bool = False,
    features: slice = slice(None),
) -> Operands:
    """X, W and G of some tokens; single tokens and those of tiles."""
    tokens, num_inputs, num_outputs = shape
    x = draw(2 * tokens, num_inputs, 1, dtype)
    w = draw(num_outputs, num_inputs, 2, dtype)
    g = draw(2 * tokens, num_outputs, 3, dtype)
    if damage is not None:
        for tensor in (x, w, g):
            tensor[1, 3] = damage
            tensor[-1, -1] = -damage
    rotating = next((fmt for fmt in formats.values() if fmt.wgrad_hadamard), None)
    amax = torch.stack([amax_of(each) for each in (x, w, g)])
    found = (
        [amax[1] if i == 1 else rotated_amax(each, rotating) for i, each in enumerate((x, w, g))]
        if rotating
        else list(amax)
    )
    delayed = {
        fmt: torch.tensor([30.0, 3e3, 1e4], device=DEVICE)
        for fmt in formats.values()
        if fmt == DELAYED_HYBRID
    }
    known = AmaxesOrScales(amax, torch.stack(found), delayed)
    return Operands(
        input=x[:tokens],
        weight=MeasuredWeight(w, formats, known, keeps_copies),
        grad_output=g[:tokens],
        of_dgrad=slice(tokens // 4 + 1),
        input_tiles=x[tokens:],
        grad_output_tiles=g[tokens:, features],
        amaxes_or_scales=known,
    )


def both(
    operands: Operands, formats: dict[str, Format], has_sensitivity: bool = True, **named: Any
) -> tuple[PartialSums, PartialSums]:
    """Return what PyTorch finds, then what the kernels find."""
    w = operands.weight.source
    generator = torch.Generator().manual_seed(4)
    row = torch.rand(w.shape[0], generator=generator).to(DEVICE) + 0.5
    col = torch.rand(w.shape[1], generator=generator).to(DEVICE) + 0.5
    sensitivity = Sensitivity(row, col, 1.0, 1.0) if has_sensitivity else None
    options = {"kind": "column", "num_shards": 1, "stream": STREAM, "features": slice(None)}
    options |= {"formats": formats, "sensitivity": sensitivity, **named}
    again = operands._replace(
        weight=MeasuredWeight(w, formats, operands.amaxes_or_scales, keeps_copies=False)
    )
    with torch.inference_mode():
        return measure.partial_sums(again, **options), fused.partial_sums(operands, **options)


def assert_close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(
        found.double(), wanted.double(), rtol=tolerance, atol=0, equal_nan=True
    )


def assert_equal(
    pair: tuple[PartialSums, PartialSums], formats: dict[str, Format], g: torch.Tensor
) -> None:
    """Counts, bins and amaxes are equal; sums are close, inner products beside their squares."""
    wanted, found = pair
    assert_close(found.amax, wanted.amax, 0.0)
    assert_close(found.health[..., ERROR_SQUARE], wanted.health[..., ERROR_SQUARE])
    assert_close(found.health[..., ZEROED], wanted.health[..., ZEROED], 3e-7)
    assert torch.equal(found.health[..., SATURATED:].float(), wanted.health[..., SATURATED:])
    one, other = (totals(each, g) for each in pair)
    assert one.dtype == other.dtype == torch.float64
    # The first-order term is a sum of both signs: its error is beside what is summed.
    num = len(formats)
    first = len(scalar_names("row", formats)) + 1 + num
    tokens = _per_token(wanted, g)[2 + num :].double()
    size = tokens.abs().sum(1) * 1e-4
    difference = (one - other)[first : first + num].abs()
    assert bool(((difference <= size) | ~torch.isfinite(size)).all())
    one[first : first + num] = other[first : first + num] = 0
    assert_close(other, one, 10 * TOLERANCE)


def _per_token(sums: PartialSums, g: torch.Tensor) -> torch.Tensor:
    if sums.per_token is not None:
        return sums.per_token
    return measure._token_sums(g, sums.products)


@pytest.mark.parametrize("names", MENU.values(), ids=MENU)
@pytest.mark.parametrize("kind", ["column", "row"])
def test_formats_and_kinds(names: tuple[str, ...], kind: str) -> None:
    formats = formats_of(names)
    operands = operands_of(formats, (40, 150, 136))
    assert_equal(both(operands, formats, kind=kind), formats, operands.grad_output)


@pytest.mark.parametrize("shape", [(32, 128, 256), (3, 17, 33), (129, 64, 130)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_ragged_shapes_without_moments(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    formats = formats_of(MENU["fp8-fp4"])
    operands = operands_of(formats, shape, dtype)
    assert_equal(both(operands, formats, False), formats, operands.grad_output)


@pytest.mark.parametrize("damage", [float("nan"), float("inf")])
@pytest.mark.parametrize("menu", ["fp8-fp4", "mixed-blocks", "tensor-scales"])
def test_what_is_not_finite(damage: float, menu: str) -> None:
    formats = formats_of(MENU[menu])
    operands = operands_of(formats, (24, 140, 130), damage=damage)
    assert_equal(both(operands, formats), formats, operands.grad_output)


def both_norms(
    operands: Operands, formats: dict[str, Format], **named: Any
) -> tuple[NormSums, NormSums]:
    """Return the norms that PyTorch finds, then those that the kernels find."""
    options = {"kind": "column", "num_shards": 1, "stream": STREAM, "formats": formats, **named}
    operands = operands._replace(
        input_tiles=operands.input[:0], grad_output_tiles=operands.grad_output[:0]
    )
    again = operands._replace(
        weight=MeasuredWeight(
            operands.weight.source, formats, operands.amaxes_or_scales, keeps_copies=False
        )
    )
    with torch.inference_mode():
        return measure.norm_sums(again, **options), fused.norm_sums(operands, **options)


def assert_equal_norms(pair: tuple[NormSums, NormSums]) -> None:
    wanted, found = pair
    assert_close(found.amax, wanted.amax, 0.0)
    assert_close(found.health[..., ERROR_SQUARE], wanted.health[..., ERROR_SQUARE])
    assert_close(found.health[..., ZEROED], wanted.health[..., ZEROED], 3e-7)
    assert torch.equal(found.health[..., SATURATED:].float(), wanted.health[..., SATURATED:])


@pytest.mark.parametrize("names", MENU.values(), ids=MENU)
@pytest.mark.parametrize(("kind", "num_shards"), [("column", 1), ("row", 2)])
def test_norms(names: tuple[str, ...], kind: str, num_shards: int) -> None:
    formats = formats_of(names)
    operands = operands_of(formats, (40, 150, 136))
    wanted, found = both_norms(operands, formats, kind=kind, num_shards=num_shards)
    assert_equal_norms((wanted, found))
    # Shards add up in one type, also with the zeros of a rank that failed.
    assert found.health.dtype == (torch.float32 if num_shards > 1 else torch.float64)


@pytest.mark.parametrize("shape", [(32, 128, 256), (3, 17, 33), (129, 64, 130)], ids=str)
@pytest.mark.parametrize("damage", [None, float("nan"), float("inf")])
def test_norms_of_ragged_shapes_and_what_is_not_finite(
    shape: tuple[int, int, int], damage: float | None
) -> None:
    formats = formats_of(MENU["fp8-fp4"])
    assert_equal_norms(both_norms(operands_of(formats, shape, damage=damage), formats))


def test_the_norms_of_a_weight_are_observed_once_for_several_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    formats = formats_of(("fp8", "mxfp4"))
    operands = operands_of(formats, (20, 96, 160), keeps_copies=True)
    assert_equal_norms(both_norms(operands, formats))
    observed: list[int] = []
    real = fused._observe_into

    def recorded(out: Any, space: Any, which: int, *args: Any) -> None:
        observed.append(which)
        real(out, space, which, *args)

    monkeypatch.setattr(fused, "_observe_into", recorded)
    again = operands._replace(input=operands.input[:9], grad_output=operands.grad_output[:9])
    assert_equal_norms(both_norms(again, formats))
    assert sorted(observed) == [0, 2]


@pytest.mark.parametrize("kind", ["column", "row"])
def test_shards_give_products_bit_for_bit(kind: str) -> None:
    """They are summed over the shards before their errors are squared."""
    formats = formats_of(MENU["fp8-fp4"])
    features = slice(2, None, 4)
    operands = operands_of(formats, (40, 128, 256), features=features)
    stream = replace(STREAM, columns=ColumnMap.shard(256, 1, 2))
    wanted, found = both(
        operands, formats, kind=kind, num_shards=2, stream=stream, features=features
    )
    assert wanted.products is not None and found.products is not None
    if DEVICE == "cpu":
        assert torch.equal(found.products, wanted.products)
    else:  # batched GEMMs may add in another order
        assert_close(found.products[0], wanted.products[0])
    assert (found.per_token is None) == (wanted.per_token is None) == (kind == "row")
    for a, b in zip(found, wanted, strict=True):
        assert a is None or (a.dtype == b.dtype and a.shape == b.shape)
    assert_close(found.scalars, wanted.scalars)
    assert_equal((wanted, found), formats, operands.grad_output)


def test_a_weight_is_observed_once_for_several_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    formats = formats_of(("fp8", "mxfp4"))
    operands = operands_of(formats, (20, 96, 160), keeps_copies=True)
    first = both(operands, formats)
    assert_equal(first, formats, operands.grad_output)
    observed: list[int] = []
    real = fused._observe

    def recorded(space: Any, which: int, *args: Any) -> torch.Tensor:
        observed.append(which)
        return real(space, which, *args)

    monkeypatch.setattr(fused, "_observe", recorded)
    again = operands._replace(input=operands.input[:9], grad_output=operands.grad_output[:9])
    assert_equal(both(again, formats), formats, again.grad_output)
    assert 1 not in observed and len(observed) == 4


def test_the_same_bits_again() -> None:
    formats = formats_of(MENU["fp8-fp4"])
    operands = operands_of(formats, (40, 150, 136))
    _, first = both(operands, formats)
    _, second = both(operands, formats)
    assert all(a is b or torch.equal(a, b) for a, b in zip(first, second, strict=True))

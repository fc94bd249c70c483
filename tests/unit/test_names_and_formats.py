"""Names of linears; formats, against ml_dtypes; and the options that are made of formats."""

import ml_dtypes
import numpy as np
import pytest

from megatron_snip.config import make_config
from megatron_snip.errors import UsageError
from megatron_snip.formats import E2M1, E4M3, E5M2, FORMATS, ElementType, get_format
from megatron_snip.formats import lowest_precision as lowest
from megatron_snip.options import BF16, Option, enumerate_options, formats_in
from megatron_snip.types import Gemm, glob_matches, linear_name, natural_key, split_linear_name


def test_names_count_layers_from_zero_and_megatron_from_one() -> None:
    assert linear_name(18, "mlp.linear_fc1") == "decoder.layers.17.mlp.linear_fc1"
    assert linear_name(1, "eh_proj", block="mtp") == "mtp.layers.0.eh_proj"
    with pytest.raises(ValueError, match="1-based, got 0"):
        linear_name(0, "mlp.linear_fc1")


@pytest.mark.parametrize("block", ["decoder", "mtp.layers_x.transformer", "encoder"])
def test_names_come_apart_again(block: str) -> None:
    name = linear_name(5, "self_attention.linear_qkv", block)
    assert split_linear_name(name) == (block, 4, "self_attention.linear_qkv")


@pytest.mark.parametrize("name", ["", "linear_fc1", "decoder.layers.x.mlp", "decoder.layers.3"])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="is not a linear's name"):
        split_linear_name(name)


def test_any_text_has_a_natural_key() -> None:
    """Names in files may be anything."""
    names = ["9" * 5000, "\u00b2", "\u00b21", "\u0663", "", "a2", "a10"]
    assert sorted(sorted(names), key=natural_key)[:2] == ["", "\u0663"]
    assert natural_key("a2") < natural_key("a10")


def test_a_glob_that_is_too_long_is_refused() -> None:
    assert glob_matches("decoder.layers.0.mlp.linear_fc1", "*.linear_fc?")
    with pytest.raises(UsageError, match="at most 500"):
        glob_matches("decoder.layers.0.mlp.linear_fc1", "*a" * 5000)


def values(element: ElementType) -> list[float]:
    """Every non-negative value, from the fields alone."""
    found, exponent = {0.0}, element.min_exponent
    steps = 2**element.mantissa_bits
    found |= {m / steps * 2.0**exponent for m in range(steps)}  # subnormal
    while 2.0**exponent <= element.max_value:
        found |= {(1 + m / steps) * 2.0**exponent for m in range(steps)}
        exponent += 1
    return sorted(value for value in found if value <= element.max_value)


@pytest.mark.parametrize(
    ("element", "dtype", "bits"),
    [
        (E4M3, ml_dtypes.float8_e4m3fn, 8),
        (E5M2, ml_dtypes.float8_e5m2, 8),
        (E2M1, ml_dtypes.float4_e2m1fn, 4),
    ],
)
def test_element_types_are_the_published_ones(element: ElementType, dtype: type, bits: int) -> None:
    codes = np.arange(2 ** (bits - 1), dtype=np.uint8).view(dtype).astype(np.float64)
    assert values(element) == sorted(set(codes[np.isfinite(codes)].tolist()))


def test_tiles_and_scales_are_those_of_the_sources() -> None:
    facts = {
        name: (f.bits, f.tile, f.weight_block, str(f.scale), f.stochastic_grad)
        for name, f in FORMATS.items()
        if f.quantized
    }
    published = {
        "fp8": (8, 128, (128, 128), "fp32", False),
        "fp8_blockwise": (8, 128, (128, 128), "e8m0", False),
        "fp8_blockwise_hybrid": (8, 128, (128, 128), "e8m0", False),
        "fp8_tensorwise": (8, 128, (128, 128), "tensor", False),
        "fp8_tensorwise_hybrid": (8, 128, (128, 128), "tensor", False),
        "fp4": (4, 128, (128, 128), "fp32", True),
        "mxfp8": (8, 32, (1, 32), "e8m0", False),
        "mxfp8_hybrid": (8, 32, (1, 32), "e8m0", False),
        "mxfp4": (4, 32, (1, 32), "e8m0", True),
        "nvfp4": (4, 16, (1, 16), "e4m3", True),
        "nvfp4_2d_rht": (4, 16, (16, 16), "e4m3 te", True),
        "fp3": (3, 128, (128, 128), "fp32", True),
    }
    assert {name: facts[name] for name in published} == published
    assert not get_format("bf16").quantized
    assert {n for n, f in FORMATS.items() if f.wgrad_hadamard} == {"nvfp4_2d_rht"}
    assert {n for n, f in FORMATS.items() if f.grad_element} == {
        name for name in FORMATS if name.endswith("_hybrid")
    }


def test_the_lowest_precision_is_that_of_fewest_bits() -> None:
    assert lowest(("fp8", "fp4", "bf16")).name == "fp4"
    assert lowest(("nvfp4", "mxfp4")).name == "nvfp4"  # the first of equals
    assert lowest(("bf16",)).name == "bf16"
    with pytest.raises(UsageError, match="no formats given"):
        lowest(())


@pytest.mark.parametrize("text", ["fp4", "bf16", "fp4-fp8-bf16", "mxfp8-nvfp4-fp3"])
def test_text_comes_back(text: str) -> None:
    assert str(Option.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "unknown format ''"),
        ("fp4-fp8", "is not an option; write one format"),
        ("fp4-fp8-bf16-fp8", "is not an option; write one format"),
        ("fp4-fp8-int8", "unknown format 'int8'; known: bf16, fp8, fp4"),
        ("fp8_delayed", "run the job in Transformer Engine's delayed scaling .* and name fp8"),
        ("fp8_delayed_hybrid", "is no longer simulated"),
    ],
)
def test_other_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Option.parse(text)


def test_mixed_plans_have_names() -> None:
    assert Option.parse("fp8-forward-fp4-backward") == Option("fp8", "fp4", "fp4")
    assert Option.parse("fp4-forward-mxfp8-backward") == Option("fp4", "mxfp8", "mxfp8")
    with pytest.raises(UsageError, match="or fp8-forward-fp4-backward or fp4-forward"):
        Option.parse("fp8-forward")


def test_an_option_can_be_one_of_the_formats() -> None:
    entries = ("fp8-forward-fp4-backward", "fp8", "bf16")
    found = enumerate_options(entries, "linear")
    assert [str(option) for option in found] == ["bf16", "fp8", "fp8-fp4-fp4"]
    assert formats_in(entries) == ("fp8", "fp4", "bf16")
    assert len(enumerate_options(entries, "gemm")) == 27
    config = make_config({"formats": ",".join(entries), "pins": "*.fc2=fp8-fp4-fp4"})
    assert config.options == found and config.lowest_format == "fp4"
    assert config.named_formats == ("fp8", "fp4", "bf16")
    with pytest.raises(UsageError, match="fp4 is neither bf16 nor an option of formats fp8-forw"):
        make_config({"formats": ",".join(entries), "pins": "*.fc2=fp4"})


def test_an_option_among_the_formats_allows_each_format_in_its_gemm() -> None:
    settings = {"formats": "fp8,fp8-forward-fp4-backward"}
    texts = ("bf16", "fp8", "fp8-fp4-fp4", "bf16-fp4-fp8", "fp4", "fp4-fp8-fp8")
    options = [Option.parse(text) for text in texts]
    per_linear = make_config(settings)
    assert [per_linear.allows(option) for option in options] == [True] * 4 + [False] * 2
    per_gemm = make_config({**settings, "granularity": "gemm"})
    assert all(per_gemm.allows(option) for option in per_gemm.options)
    assert make_config({"formats": "fp8,fp4"}).allows(Option.parse("fp4-fp8-bf16"))


def test_gemms_have_their_format() -> None:
    option = Option("fp4", "fp8", "bf16")
    assert [option[gemm] for gemm in Gemm] == ["fp4", "fp8", "bf16"]
    assert option.formats == ("fp4", "fp8", "bf16")
    assert [option.share_in(name) for name in ("fp4", "fp3")] == [pytest.approx(1 / 3), 0.0]
    assert BF16.share_in("bf16") == 1.0


def test_a_choice_per_linear_or_per_gemm_highest_precision_first() -> None:
    formats = ("fp4", "bf16", "fp8", "fp4")
    assert [str(o) for o in enumerate_options(formats, "linear")] == ["bf16", "fp8", "fp4"]
    every = enumerate_options(formats, "gemm")
    assert len(set(every)) == len(every) == 27
    assert (str(every[0]), str(every[-1])) == ("bf16", "fp4")
    with pytest.raises(UsageError):
        enumerate_options((), "linear")

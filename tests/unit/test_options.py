"""What a linear may choose."""

import pytest

from megatron_snip.errors import UsageError
from megatron_snip.options import BF16, Option, enumerate_options
from megatron_snip.types import Gemm


@pytest.mark.parametrize("text", ["fp4", "bf16", "fp4-fp8-bf16", "mxfp8-nvfp4-fp3"])
def test_text_comes_back(text: str) -> None:
    assert str(Option.parse(text)) == text


@pytest.mark.parametrize("text", ["", "fp4-fp8", "fp4-fp8-bf16-fp8", "int8", "fp4-fp8-int8"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Option.parse(text)


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

"""Names of linears and the operands of GEMMs."""

import pytest

from megatron_snip.errors import UsageError
from megatron_snip.types import glob_matches, linear_name, natural_key, split_linear_name


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

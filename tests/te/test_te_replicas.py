"""Linears that tensor-parallel ranks hold whole, as one rank sees them.

What ranks measure together is tested in tests/distributed/test_te.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core.extensions import transformer_engine as extension
from megatron_snip.linears.layout import find_linears
from megatron_snip.linears.te_modules import te_kind
from megatron_snip.linears.te_replicas import (
    is_replica,
    is_understood,
    splits_tokens,
)

from megatron_snip.topology import TensorAxis, Topology
from tests.te.models import build
from tests.te.test_te_model import logged as logged  # a fixture

SECOND_OF_TWO = Topology(rank=1, world_size=2, tensor=TensorAxis(1, 2))


def plain_linear(config: Any) -> Any:
    return extension.TELinear(
        64,
        32,
        parallel_mode="duplicated",
        config=config,
        init_method=torch.nn.init.zeros_,
        bias=False,
        skip_bias_add=True,
        skip_weight_param_allocation=False,
    )


@pytest.fixture
def model() -> Iterator[Any]:
    """A model with unsharded linears in its layers; ranks are claimed once it is built."""
    model = build()
    for layer in model.decoder.layers:
        for name in ("linear_q_down_proj", "linear_wk"):
            setattr(layer.self_attention, name, plain_linear(model.config))
    yield model
    model.config.tensor_model_parallel_size = 1


def test_on_one_rank_they_are_linears_as_others(model: Any, logged: list[str]) -> None:
    linears = find_linears([model], Topology())
    assert len(linears) == 8 + 4 and logged == []
    for module, place in linears:
        assert not is_replica(module) and place.tensor == TensorAxis()
        if te_kind(module) == "column" and place.name.endswith(("_down_proj", "linear_wk")):
            assert (place.in_features, place.out_features) == (64, 32)


def test_on_several_they_are_one_shard_of_which_rank_0_speaks(
    model: Any, logged: list[str]
) -> None:
    model.config.tensor_model_parallel_size = 2
    places = {place.name: place for _, place in find_linears([model], SECOND_OF_TWO)}
    for layer in range(2):
        place = places[f"decoder.layers.{layer}.self_attention.linear_q_down_proj"]
        assert (place.in_features, place.out_features) == (64, 32)
        assert (place.tensor, place.tensor.shard) == (TensorAxis(rank=1), 0)
        assert places[f"decoder.layers.{layer}.mlp.linear_fc1"].tensor == SECOND_OF_TWO.tensor


def test_those_whose_tokens_are_not_known_stay_bf16_and_are_named(
    model: Any, logged: list[str]
) -> None:
    model.config.tensor_model_parallel_size = 2
    names = [place.name for _, place in find_linears([model], SECOND_OF_TWO)]
    assert len(names) == 8 + 2 and not any(name.endswith("linear_wk") for name in names)
    (text,) = [text for text in logged if "stay BF16" in text]
    assert text.startswith("2 linears stay BF16: every tensor-parallel rank holds them whole")
    for layer in range(2):
        assert f"decoder.layers.{layer}.self_attention.linear_wk" in text
    assert "linear_q_down_proj" not in text


def test_tokens_are_split_under_sequence_parallelism_alone(model: Any) -> None:
    linear = model.decoder.layers[0].self_attention.linear_q_down_proj
    sharded = model.decoder.layers[0].mlp.linear_fc1
    found = {}
    for size in (1, 2):
        for split in (False, True):
            model.config.tensor_model_parallel_size = size
            model.config.sequence_parallel = split
            found[size, split] = splits_tokens(linear)
            assert not splits_tokens(sharded) and not is_replica(sharded)
    model.config.sequence_parallel = False
    assert found == {(1, False): False, (1, True): False, (2, False): False, (2, True): True}


def test_names_are_matched_whole() -> None:
    assert is_understood("self_attention.linear_kv_down_proj") and is_understood("fc1_latent_proj")
    assert not is_understood("my_linear_kv_down_proj") and not is_understood("linear_wk")

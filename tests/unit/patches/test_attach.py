"""What a controller is told of the training script's settings."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_snip.patches.attach import microbatch_tokens_of


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({}, (1024, 1024)),
        ({"decoder_seq_length": 114}, (228, 1024)),  # a T5; in pretrain_vlm.py no encoder counts
        ({"variable_seq_lengths": True}, (None, None)),
    ],
)
def test_tokens_of_a_microbatch(settings: dict[str, Any], tokens: tuple[Any, Any]) -> None:
    args = {"micro_batch_size": 2, "seq_length": 512, "decoder_seq_length": None, **settings}
    assert microbatch_tokens_of(SimpleNamespace(**args)) == tokens

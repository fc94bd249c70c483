"""How settings of a training script reach the controller."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from megatron_snip.config import SnipConfig
from megatron_snip.errors import UsageError
from megatron_snip.linears.runtime import MicrobatchTokens
from megatron_snip.patches.attach import run_directory_of, tokens_of


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({}, MicrobatchTokens(1024, 1024)),
        # a T5; in pretrain_vlm.py no encoder counts
        ({"decoder_seq_length": 114}, MicrobatchTokens(228, 1024)),
        ({"variable_seq_lengths": True}, MicrobatchTokens()),
        ({"eval_micro_batch_size": None}, MicrobatchTokens(1024, 1024)),
        ({"eval_micro_batch_size": 2}, MicrobatchTokens(1024, 1024)),
        (
            {"eval_micro_batch_size": 3},
            MicrobatchTokens(1024, 1024, MicrobatchTokens(1536, 1536)),
        ),
        (
            {"eval_micro_batch_size": 3, "full_validation": True},
            MicrobatchTokens(1024, 1024, MicrobatchTokens(512, 512)),
        ),
    ],
)
def test_tokens_of_a_microbatch(settings: dict[str, Any], tokens: MicrobatchTokens) -> None:
    args = {"seq_length": 512, "decoder_seq_length": None, "micro_batch_size": 2, **settings}
    assert tokens_of(Namespace(**args), Namespace()) == tokens


def test_what_the_built_model_s_config_has_decides_the_tokens() -> None:
    """A script may have changed it; and a data set of Bridge varies where the config does not."""
    args = {"seq_length": 512, "micro_batch_size": 2, "variable_seq_lengths": False}
    varies = Namespace(variable_seq_lengths=True)
    assert tokens_of(Namespace(**args), varies) == MicrobatchTokens()
    fixed = Namespace(variable_seq_lengths=False)
    assert tokens_of(Namespace(**{**args, **vars(varies)}), fixed) == MicrobatchTokens()
    assert tokens_of(Namespace(**args), fixed) == MicrobatchTokens(1024, 1024)


def test_checkpoints_in_an_object_store_need_a_run_directory_of_their_own() -> None:
    store = Namespace(save="msc://s3/llama/ckpt")
    with pytest.raises(UsageError, match="object store msc://s3/llama/ckpt"):
        run_directory_of(SnipConfig(), store)
    assert run_directory_of(SnipConfig(output_dir=Path("/runs/a")), store) == Path("/runs/a")
    assert run_directory_of(SnipConfig(), Namespace(save="/ckpt")) == Path("/ckpt/snip")

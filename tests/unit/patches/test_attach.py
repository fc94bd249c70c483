"""How settings of a training script reach the controller."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from megatron_snip.config import SnipConfig
from megatron_snip.errors import UsageError
from megatron_snip.patches.attach import (
    evaluation_samples_of,
    microbatch_tokens_of,
    run_directory_of,
)


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({}, (1024, 1024)),
        ({"decoder_seq_length": 114}, (228, 1024)),  # a T5; in pretrain_vlm.py no encoder counts
        ({"variable_seq_lengths": True}, (None, None)),
    ],
)
def test_tokens_of_a_microbatch(settings: dict[str, Any], tokens: tuple[Any, Any]) -> None:
    args = {"seq_length": 512, "decoder_seq_length": None, **settings}
    assert microbatch_tokens_of(Namespace(**args), samples=2) == tokens


@pytest.mark.parametrize(
    ("settings", "samples"),
    [
        ({}, 4),  # before 0.18
        ({"eval_micro_batch_size": None}, 4),
        ({"eval_micro_batch_size": 3}, 3),
        ({"eval_micro_batch_size": 3, "full_validation": True}, 1),
    ],
)
def test_samples_of_an_evaluations_microbatch(settings: dict[str, Any], samples: int) -> None:
    assert evaluation_samples_of(Namespace(micro_batch_size=4, **settings)) == samples


def test_checkpoints_in_an_object_store_need_a_run_directory_of_their_own() -> None:
    store = Namespace(save="msc://s3/llama/ckpt")
    with pytest.raises(UsageError, match="object store msc://s3/llama/ckpt"):
        run_directory_of(SnipConfig(), store)
    assert run_directory_of(SnipConfig(output_dir=Path("/runs/a")), store) == Path("/runs/a")
    assert run_directory_of(SnipConfig(), Namespace(save="/ckpt")) == Path("/ckpt/snip")

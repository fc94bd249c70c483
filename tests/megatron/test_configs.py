"""configs/ as Megatron's own parser reads them: the trainer's settings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from megatron_snip.argument_file import expand
from megatron_snip.cli.commands import build_parser
from megatron_snip.cli.train import read_settings
from megatron_snip.trainer.config import TrainConfig
from megatron_snip.trainer.megatron_arguments import MEGATRON_DEFAULTS
from tests.distributed.launch import RANK_ENVIRONMENT, ROOT
from tests.megatron.lab import CPU

CASES = {
    "tinyllama-1.1b": ("tinyllama-1.1b", "data", 8),
    "open-llama-3b": ("open-llama-3b", "data", 8),
    "open-llama-7b": ("open-llama-7b", "data", 8),
    "llama-70b, 8": ("llama-70b", "llama-70b-8gpus", 8),
    "llama-70b, 64": ("llama-70b", "llama-70b-64gpus", 64),
    "mixtral-8x7b": ("mixtral-8x7b", "mixtral-8x7b-8gpus", 8),
}
"""Model, parallel sizes, GPUs."""

BARE = """
    --num-layers 2 --hidden-size 128 --num-attention-heads 2 --seq-length 16
    --max-position-embeddings 16 --micro-batch-size 1 --train-iters 5 --lr 1e-3
    --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope
    --tokenizer-type NullTokenizer --vocab-size 99
"""
"""What Megatron cannot do without."""

UNSAID = {
    "num_query_groups",
    "vocab_size",
    "ffn_hidden_size",
    "expert_tensor_parallel_size",
    "lr_decay_iters",
    "global_batch_size",
    "eval_interval",
    "split",
}
"""Settings that Megatron leaves open or works out later, and the tokenizer's size."""


def files(model: str, parallel: str) -> list[str]:
    folder = ROOT / "configs"
    return [f"@{folder}/models/{model}.args", f"@{folder}/parallel/{parallel}.args"]


@pytest.fixture(scope="module")
def read() -> dict[str, Any]:
    """What Megatron makes of every case, and of the bare command line."""
    cases: dict[str, Any] = {
        name: {"words": [*expand(files(model, parallel)), *CPU.split()], "world_size": gpus}
        for name, (model, parallel, gpus) in CASES.items()
    }
    words = [*BARE.split(), *CPU.split()]
    cases["bare"] = {"words": words, "world_size": 1}
    done = subprocess.run(
        [sys.executable, "-m", "tests.megatron.read_arguments"],
        input=json.dumps(cases),
        env={**os.environ, **RANK_ENVIRONMENT, "PYTHONWARNINGS": "ignore"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results: dict[str, Any] = json.loads(done.stdout)
    return results


def settings(words: list[str]) -> TrainConfig:
    return read_settings(build_parser("train").parse_args(["train", *words]))


def assert_same(ours: TrainConfig, megatrons: dict[str, Any]) -> None:
    """Compare every setting that both know."""
    fields = (set(TrainConfig.model_fields) & set(megatrons)) - UNSAID
    assert len(fields) > 30
    mine = {name: getattr(ours, name) for name in fields}
    theirs = {name: megatrons[name] for name in fields}
    assert ours.expert_tensor_size == megatrons["expert_tensor_parallel_size"]
    assert mine == theirs


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("mixtral")])
def test_the_trainer_reads_what_megatron_reads(read: dict[str, Any], name: str) -> None:
    model, parallel, _ = CASES[name]
    ours, megatrons = settings(files(model, parallel)), read[name]
    assert_same(ours, megatrons)
    assert ours.padded_vocab_size == megatrons["padded_vocab_size"]
    assert ours.ffn_width == megatrons["ffn_hidden_size"]
    assert ours.global_batch_size == megatrons["global_batch_size"]
    groups = megatrons["num_query_groups"] if megatrons["group_query_attention"] else None
    assert ours.num_query_groups == groups


def test_the_defaults_are_megatrons(read: dict[str, Any]) -> None:
    ours, megatrons = settings(["--megatron-defaults", *BARE.split()]), read["bare"]
    assert_same(ours, megatrons)
    assert set(MEGATRON_DEFAULTS) <= set(megatrons)
    assert (ours.ffn_width, ours.token_ids) == (megatrons["ffn_hidden_size"], 100)

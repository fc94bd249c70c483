"""Megatron on one rank, for tests that need its model: a gloo group of this process alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_snip.patches import cpu

MakeModel = Callable[..., GPTModel]


@pytest.fixture(scope="module")
def megatron() -> Iterator[None]:
    """Parallel state of size 1, on the CPU patch; everything is put back."""
    installed = cpu.install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        if installed:
            cpu.uninstall()


@pytest.fixture
def make_model(megatron: None) -> MakeModel:
    """Build a small GPTModel; keywords go to its TransformerConfig."""

    def make(**changes: Any) -> GPTModel:
        model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        torch.manual_seed(1)
        values = {
            "num_layers": 2,
            "hidden_size": 64,
            "ffn_hidden_size": 96,
            "num_attention_heads": 2,
            "normalization": "RMSNorm",
            "add_bias_linear": False,
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "use_cpu_initialization": True,
            "bias_activation_fusion": False,
            "bias_dropout_fusion": False,
            "masked_softmax_fusion": False,
            "persist_layer_norm": False,
            "gradient_accumulation_fusion": False,
            "hidden_dropout": 0.1,
            "attention_dropout": 0.0,
        }
        config = TransformerConfig(**{**values, **changes})
        spec = get_gpt_layer_local_spec(
            normalization="RMSNorm",
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=False,
        )
        return GPTModel(
            config,
            spec,
            vocab_size=32,
            max_sequence_length=16,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )

    return make

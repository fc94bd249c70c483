"""A Hugging Face cache with nothing but the published configs that the recipes ask for.

Bridge's recipes read a model's architecture from its `config.json` on the Hub. These are the fields
that Bridge reads of it; `HF_HUB_OFFLINE=1 HF_HUB_CACHE=...` makes the Hub's client look here.
"""

import json
from pathlib import Path
from typing import Any

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}

QWEN_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}

CONFIGS = {
    "meta-llama/Llama-3.2-1B": ("main", LLAMA),
    "Qwen/Qwen3-30B-A3B": ("ad44e777bcd18fa416d9da3bd8f70d33ebb85d39", QWEN_MOE),
}
"""Model -> the revision that its recipe asks for, and the config."""


def write_hub(folder: Path) -> None:
    """Write the cache; a second call changes nothing."""
    for name, (revision, config) in CONFIGS.items():
        snapshots = folder / f"models--{name.replace('/', '--')}" / "snapshots"
        commit = snapshots / ("0" * 40 if revision == "main" else revision)
        commit.mkdir(parents=True, exist_ok=True)
        (commit / "config.json").write_text(json.dumps(config))
        references = snapshots.with_name("refs")
        references.mkdir(exist_ok=True)
        (references / "main").write_text(commit.name)

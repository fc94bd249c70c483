"""Write the number of parameters of the model that Megatron makes of a command line for GPUS GPUs.

The model is that of the tiny script; a line that Megatron refuses ends the process.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training.arguments import (
    core_transformer_config_from_args,
    parse_args,
    validate_args,
)
from megatron.training.global_vars import set_args

from tests.megatron.pretrain_tiny import model_provider

ALONE: dict[str, Any] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "sequence_parallel": False,
    "use_cpu_initialization": True,
    "perform_initialization": False,
    "gradient_accumulation_fusion": False,
}
"""The complete model on one rank, without kernels for GPUs."""

if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    os.environ["WORLD_SIZE"] = os.environ["GPUS"]
    args = parse_args()
    validate_args(args)
    build_tokenizer(args)  # sets padded_vocab_size
    set_args(args)
    # What the tiny script builds in any case.
    assert args.untie_embeddings_and_output_weights and args.position_embedding_type == "rope"
    config = core_transformer_config_from_args(args)
    for name, value in ALONE.items():
        setattr(config, name, value)
    with torch.device("meta"):  # it takes no memory
        model = model_provider(config=config)
    results = {"parameters": sum(parameter.numel() for parameter in model.parameters())}
    (Path(os.environ["TINY_RESULTS"]) / "0.json").write_text(json.dumps(results))

"""What Megatron's own parser makes of command lines, and the model that it would build.

Standard input: {name: {"words": [...], "world_size": N}}. Standard output: {name: parameters of the
model}. A line that Megatron refuses ends the process.
"""

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from megatron_snip.patches import cpu

cpu.install(claim_cuda=True)

from megatron.core import parallel_state  # noqa: E402  after the patch
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer  # noqa: E402
from megatron.training.arguments import (  # noqa: E402
    core_transformer_config_from_args,
    parse_args,
    validate_args,
)

ALONE = {
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
"""The whole model on one rank, with no kernels that are not there."""


def read(words: list[str], world_size: int) -> Any:
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(world_size))
    sys.argv = ["pretrain_gpt.py", *words]
    args = parse_args()
    validate_args(args)
    build_tokenizer(args)  # sets padded_vocab_size
    return args


def count_parameters(args: Any) -> int:
    """Build the model without memory for it."""
    config = core_transformer_config_from_args(args)
    for name, value in ALONE.items():
        setattr(config, name, value)
    spec = get_gpt_layer_local_spec(num_experts=args.num_experts, normalization=args.normalization)
    with torch.device("meta"):
        model = GPTModel(
            config,
            spec,
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            rotary_base=args.rotary_base,
        )
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Megatron prints is no reply
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    results = {}
    for name, case in json.load(sys.stdin).items():
        results[name] = count_parameters(read(case["words"], case["world_size"]))
    print(json.dumps(results), file=replies, flush=True)


if __name__ == "__main__":
    main()

"""What Megatron's own parser makes of command lines.

Standard input: {name: {"words": [...], "world_size": N}}. Standard output: {name: namespace}. A
line that Megatron refuses ends the process.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch.distributed as dist

from megatron_snip.patches import cpu

cpu.install(claim_cuda=True)

from megatron.core import parallel_state  # noqa: E402  after the patch
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer  # noqa: E402
from megatron.training.arguments import parse_args, validate_args  # noqa: E402


def read(words: list[str], world_size: int) -> Any:
    """Return Megatron's validated namespace."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(world_size))
    sys.argv = ["pretrain_gpt.py", *words]
    args = parse_args()
    validate_args(args)
    build_tokenizer(args)  # sets padded_vocab_size
    return args


def plain(value: Any) -> Any:
    """Return what JSON can say of a value."""
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Megatron prints is no reply
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    results = {}
    for name, case in json.load(sys.stdin).items():
        args = read(case["words"], case["world_size"])
        results[name] = {key: plain(value) for key, value in vars(args).items()}
    print(json.dumps(results), file=replies, flush=True)


if __name__ == "__main__":
    main()

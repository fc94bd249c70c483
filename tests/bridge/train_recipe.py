"""A training script as a user of Megatron-Bridge writes it: one of its recipes, shrunk.

    torchrun ... train_recipe.py llama|moe [KEY=VALUE ...]

KEY=VALUE are Bridge's own overrides. It does not use SNIP, except that TINY_CALLBACK (settings as
JSON) gives `pretrain` a SnipCallback. Every rank writes its results to the folder in TINY_RESULTS.
TINY_KILL_AFTER: SIGKILL after this iteration's checkpoint, as on a lost machine.
TINY_EARLY: SNIP may measure before the optimizer has made ten steps.
TINY_BREAK: the loss is infinite whenever a linear runs FP4.
"""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

SHRUNK = """
    model.num_layers=4 model.hidden_size=128 model.ffn_hidden_size=256 model.kv_channels=32
    model.num_attention_heads=4 model.num_query_groups=4 model.seq_length=32 dataset.seq_length=32
    model.tensor_model_parallel_size=1 model.pipeline_model_parallel_size=1
    train.train_iters=10 train.global_batch_size=8 train.micro_batch_size=2 train.manual_gc=false
    optimizer.lr=0.003 scheduler.lr_warmup_iters=2 validation.eval_interval=5
    validation.eval_iters=1 logger.log_interval=1 dataset.num_workers=0
    tokenizer.tokenizer_type=NullTokenizer tokenizer.tokenizer_model=null tokenizer.vocab_size=127
    checkpoint.save=null checkpoint.load=null checkpoint.save_interval=7
    logger.tensorboard_dir=null ddp.data_parallel_sharding_strategy=no_shard
"""
EXPERTS = """
    model.num_moe_experts=4 model.moe_router_topk=2 model.moe_ffn_hidden_size=128
    model.expert_model_parallel_size=1 model.expert_tensor_parallel_size=1
    model.moe_token_dispatcher_type=alltoall model.moe_router_fusion=false
    model.moe_permute_fusion=false model.cuda_graph_impl=none
"""


class Results:
    """Losses of each step and digests of the weights, for the test."""

    def __init__(self) -> None:
        self.losses: list[str] = []
        self.evaluated: list[str] = []

    def on_train_step_end(self, context: Any) -> None:
        self.losses += [f"{name} {float(x)!r}" for name, x in context.loss_dict.items()]
        if context.grad_norm is not None:
            self.losses.append(f"norm {float(context.grad_norm)!r}")

    def on_eval_end(self, context: Any) -> None:
        self.evaluated += [repr(float(x)) for x in context.total_loss_dict.values()]

    def on_checkpoint_save(self, context: Any) -> None:
        if str(context.state.train_state.step) == os.environ.get("TINY_KILL_AFTER"):
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_end(self, context: Any) -> None:
        weights = hashlib.sha256()
        for chunk in context.model:
            for parameter in chunk.parameters():
                weights.update(parameter.detach().float().numpy().tobytes())
        result = {"weights": weights.hexdigest(), "losses": self.losses}
        path = Path(os.environ["TINY_RESULTS"]) / f"{os.environ['RANK']}.json"
        path.write_text(json.dumps({**result, "evaluated": self.evaluated}))


def main() -> None:
    # Not at the top: a process that a checkpoint starts imports this file, and needs none of it.
    from megatron.bridge.recipes.llama import llama32_1b_pretrain_config
    from megatron.bridge.recipes.qwen import qwen3_30b_a3b_pretrain_config
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    from megatron_snip.run import observation

    if "TINY_EARLY" in os.environ:
        observation.MIN_OPTIMIZER_STEPS = 0
    recipes = {"llama": llama32_1b_pretrain_config, "moe": qwen3_30b_a3b_pretrain_config}
    name, *overrides = sys.argv[1:]
    cfg = recipes[name]()
    experts = EXPERTS.split() if name == "moe" else []
    words = [*SHRUNK.split(), *experts, *overrides]
    cfg = process_config_with_overrides(cfg, cli_overrides=words)
    callbacks: list[Any] = [Results()]
    if "TINY_CALLBACK" in os.environ:
        from megatron_snip.bridge import SnipCallback, SnipConfig

        callbacks.append(SnipCallback(SnipConfig(**json.loads(os.environ["TINY_CALLBACK"]))))
    pretrain(cfg, forward_step, callbacks=callbacks)


if __name__ == "__main__":
    main()

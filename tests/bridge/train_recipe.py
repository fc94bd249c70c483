"""A training script as a user of Megatron-Bridge writes it: one of its recipes, shrunk.

    torchrun ... train_recipe.py llama|moe [KEY=VALUE ...]

KEY=VALUE are Bridge's own overrides. It does not use SNIP, except that TINY_CALLBACK (settings as
JSON) gives `pretrain` a SnipCallback, without settings if it is `null`. Every rank writes its
results to the folder in TINY_RESULTS.
TINY_KILL_AFTER: SIGKILL after this iteration's checkpoint, as on a lost machine.
TINY_BREAK: the loss is infinite whenever a linear runs FP4.
TINY_WEIGHTS: weights are those of `weights.py`, which do not depend on the loop.
TINY_PRECISION: name of the recipe's mixed precision; weights are stored in BF16.
TINY_STORED: they are stored in that precision.
TINY_QUANT: `model.quant_recipe` as JSON.
TINY_TRACKERS: MLflow and Comet are stand-ins, which write to this folder.
TINY_TEACHER: the model has a teacher, which is a copy of itself.
"""

import copy
import functools
import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
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
        flops = float(context.state.train_state.floating_point_operations_so_far)
        result = {"weights": weights.hexdigest(), "losses": self.losses, "flops": flops}
        path = Path(os.environ["TINY_RESULTS"]) / f"{os.environ['RANK']}.json"
        path.write_text(json.dumps({**result, "evaluated": self.evaluated}))


def recipe_of(words: Sequence[str]) -> Any:
    """Return the settings of `llama` or `moe`, the first word, under Bridge's own overrides."""
    # Not at the top: a process that a checkpoint starts imports this file, and needs none of it.
    from megatron.bridge.recipes.llama import llama32_1b_pretrain_config
    from megatron.bridge.recipes.qwen import qwen3_30b_a3b_pretrain_config
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    name, *overrides = words
    recipes = {"llama": llama32_1b_pretrain_config, "moe": qwen3_30b_a3b_pretrain_config}
    experts = EXPERTS.split() if name == "moe" else []
    cfg = recipes[name]()
    shrunk = _as_named_by(cfg, [*SHRUNK.split(), *experts, *overrides])
    cfg = process_config_with_overrides(cfg, cli_overrides=shrunk)
    if "TINY_PRECISION" in os.environ:
        from megatron.bridge.training.mixed_precision import get_mixed_precision_config

        cfg.mixed_precision = get_mixed_precision_config(os.environ["TINY_PRECISION"])
        cfg.mixed_precision.fp8_param_gather = "TINY_STORED" in os.environ
    if "TINY_QUANT" in os.environ:
        from megatron.core.quantization.quant_config import RecipeConfig

        cfg.model.quant_recipe = RecipeConfig.from_config_dict(json.loads(os.environ["TINY_QUANT"]))
    if "TINY_TEACHER" in os.environ:
        from megatron.bridge.models.distillation_provider import convert_to_distillation_provider

        cfg.model = convert_to_distillation_provider(cfg.model, copy.deepcopy(cfg.model))
    if "TINY_WEIGHTS" in os.environ:
        from tests.bridge.weights import set_weights

        cfg.model.register_pre_wrap_hook(set_weights)
    return cfg


def _as_named_by(cfg: Any, overrides: Sequence[str]) -> list[str]:
    """Return overrides of 0.6 with the names that an older release has for some settings."""
    names = {}
    if "seq_length" not in cfg.dataset.__dataclass_fields__:
        names["dataset.seq_length="] = "dataset.sequence_length="
    if not hasattr(cfg, "validation"):
        names["validation."] = "train."
    renamed = []
    for override in overrides:
        old = next((name for name in names if override.startswith(name)), "")
        renamed.append(names.get(old, "") + override.removeprefix(old))
    return renamed


def breaking(forward_step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward step whose loss is infinite whenever a linear runs FP4."""
    from megatron_snip.patches.install import REGISTRY

    @functools.wraps(forward_step)  # Bridge reads the signature
    def broken(
        state: Any, data_iterator: Any, model: Any, return_schedule_plan: bool = False
    ) -> Any:
        output, loss = forward_step(state, data_iterator, model, return_schedule_plan)
        linears = REGISTRY.session.controller.model.linears
        if any("fp4" in str(linear.option) for linear in linears):
            output = output * float("inf")
        return output, loss

    return broken


def main() -> None:
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    if "TINY_TRACKERS" in os.environ:
        sys.path.insert(0, str(Path(__file__).parents[1] / "stand_ins" / "trackers"))
    callbacks: list[Any] = [Results()]
    if "TINY_CALLBACK" in os.environ:
        from megatron_snip.bridge import SnipCallback, SnipConfig

        given = json.loads(os.environ["TINY_CALLBACK"])
        callbacks.append(SnipCallback() if given is None else SnipCallback(SnipConfig(**given)))
    step = breaking(forward_step) if "TINY_BREAK" in os.environ else forward_step
    pretrain(recipe_of(sys.argv[1:]), step, callbacks=callbacks)


if __name__ == "__main__":
    main()

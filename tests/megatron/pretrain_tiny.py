"""A pretraining script as a user of Megatron-LM would write it: a tiny model on made-up text.

It does not use SNIP. Every rank writes its results to the folder in TINY_RESULTS. Variables:
TINY_KILL_AFTER: SIGKILL in the iteration after this one, as on a lost machine.
TINY_DOUBT: Megatron doubts the losses of this iteration (0-based) and repeats it.
TINY_GIVE_UP: Megatron also ends the job there, after a checkpoint of the iteration before.
TINY_BAD_STATE: checkpoints hold a state of SNIP that is damaged, of this version.
TINY_STATE: checkpoints hold the state of SNIP in this file, as another version has written it.
TINY_OWN_FLAGS: the script parses its own flags.
TINY_AUTO: the script imports megatron_snip.auto, before all else.
TINY_BREAK: the loss is infinite under the plan of this number, and those after it, of the
different plans that run FP4.
TINY_FAULTS: every refresh fails, as in `faults.py`.
TINY_CONFIG: values that the model's config gets, as JSON; the arguments stay as they are.
TINY_FUSED_WGRAD: weight gradients are added in a GEMM, as is the default on a GPU.
TINY_RESTART: a second training in the same process, as in-process restart does.
"""

import argparse
import hashlib
import json
import math
import os
import re
import signal
from functools import partial
from pathlib import Path
from typing import Any

if "TINY_AUTO" in os.environ:
    import megatron_snip.auto  # noqa: F401

import torch
from megatron.core import parallel_state
from megatron.core.datasets.utils import Split
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from megatron.training.training import destroy_global_state

if "TINY_BAD_STATE" in os.environ:
    from megatron_snip.run.state import RunState

    bad = {"version": int(os.environ["TINY_BAD_STATE"]), "plan": []}
    setattr(RunState, "to_dict", lambda self: bad)  # noqa: B010

if "TINY_STATE" in os.environ:
    from megatron_snip.run.state import RunState

    written = json.loads(Path(os.environ["TINY_STATE"]).read_text())
    setattr(RunState, "to_dict", lambda self: written)  # noqa: B010

if "TINY_FAULTS" in os.environ:
    from tests.megatron import faults

    faults.install()

if "TINY_OWN_FLAGS" in os.environ:
    argparse.ArgumentParser().parse_args()

MODELS: list[torch.nn.Module] = []
LOSSES: list[str] = []
EVALUATED: list[str] = []
OPTIONS: list[str] = []
"""Of the linears; filled for TINY_BREAK alone."""
WITH_FP4: list[list[str]] = []
"""All that `OPTIONS` was with FP4, each once."""

if "TINY_BREAK" in os.environ:
    from megatron_snip.linears.model import PlannedModel

    apply = PlannedModel.apply

    def noted(self: PlannedModel, options: Any) -> Any:
        OPTIONS[:] = map(str, options.values())
        if any("fp4" in option for option in OPTIONS) and OPTIONS not in WITH_FP4:
            WITH_FP4.append(list(OPTIONS))
        return apply(self, options)

    setattr(PlannedModel, "apply", noted)  # noqa: B010


class MadeUpText(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences that a small model can learn: each token is one or two after the one before."""

    def __init__(self, samples: int, length: int, vocabulary: int, split: Split) -> None:
        self.samples, self.length, self.vocabulary = samples, length, vocabulary
        self.split = split  # evaluations have a micro-batch of their own

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        noise = torch.Generator().manual_seed(index)
        tokens = torch.zeros(self.length + 1, dtype=torch.int64)
        tokens[0] = torch.randint(self.vocabulary, (), generator=noise)
        jumps = torch.randint(1, 3, (self.length,), generator=noise)
        tokens[1:] = tokens[0] + jumps.cumsum(0)
        tokens %= self.vocabulary
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": torch.ones(self.length),
            "position_ids": torch.arange(self.length),
        }


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> torch.nn.Module:
    args = get_args()
    config = core_transformer_config_from_args(args) if config is None else config
    if args.fp8 or args.fp4:
        # Of weights that are stored quantized, Megatron's optimizer keeps what they were before an
        # initialization on the CPU.
        config.use_cpu_initialization = False
    if "TINY_FUSED_WGRAD" in os.environ:
        config.gradient_accumulation_fusion = True
    for name, value in json.loads(os.environ.get("TINY_CONFIG", "{}")).items():
        setattr(config, name, value)
    common = {
        "vocab_size": args.padded_vocab_size,
        "max_sequence_length": args.max_position_embeddings,
        "pre_process": pre_process,
        "post_process": post_process,
        "share_embeddings_and_output_weights": False,
        "position_embedding_type": "rope",
        "vp_stage": vp_stage,
        "pg_collection": pg_collection,
    }
    if args.hybrid_layer_pattern:
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
        from megatron.core.models.hybrid.hybrid_model import HybridModel

        common["hybrid_layer_pattern"] = args.hybrid_layer_pattern
        MODELS.append(HybridModel(config, hybrid_stack_spec, **common))
        return MODELS[-1]
    te, latent = args.transformer_impl == "transformer_engine", args.multi_latent_attention
    if te:  # Megatron has drawn random tensors of a shape that depends on context parallelism
        torch.manual_seed(args.seed)
    make = get_gpt_layer_with_transformer_engine_spec if te else get_gpt_layer_local_spec
    own = {"normalization": args.normalization}
    if te:
        own = {"use_te_op_fuser": args.use_transformer_engine_op_fuser}
    spec = make(
        num_experts=args.num_experts,
        moe_grouped_gemm=args.moe_grouped_gemm,
        multi_latent_attention=latent,
        **own,
    )
    if args.mtp_num_layers:
        common["mtp_block_spec"] = get_gpt_mtp_block_spec(config, spec, te, vp_stage=vp_stage)
    MODELS.append(GPTModel(config, spec, **common))
    return MODELS[-1]


def loss_func(mask: torch.Tensor, output: torch.Tensor, training: bool) -> Any:
    loss = torch.sum(output.view(-1).float() * mask.view(-1))
    tokens = mask.sum().to(torch.int)
    if training:
        doubted = get_args().curr_iteration == int(os.environ.get("TINY_DOUBT", "-1"))
        get_rerun_state_machine().validate_result(
            result=loss.detach().clone(),  # the schedule divides the loss in place
            rejection_func=lambda _: doubted,
            message="doubtful loss",
            fatal="TINY_GIVE_UP" in os.environ,
        )
    (LOSSES if training else EVALUATED).append(loss.item().hex())
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.float()])}


def forward_step(data_iterator: Any, model: Any, return_schedule_plan: bool = False) -> Any:
    after = int(os.environ.get("TINY_KILL_AFTER", "0"))
    if after and model.training and get_args().curr_iteration >= after:
        os.kill(os.getpid(), signal.SIGKILL)
    batch = next(data_iterator)
    for key in batch:  # as Megatron's own scripts do, into the very dict that was handed out
        batch[key] = batch[key].cuda(non_blocking=True)
    cp_group = parallel_state.get_context_parallel_group()
    batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=cp_group)
    training = get_attr_wrapped_model(model, "training")
    given = batch["tokens"], batch["position_ids"], None
    if return_schedule_plan:  # --overlap-moe-expert-parallel-comm runs its parts
        plan = model.build_schedule_plan(*given, labels=batch["labels"])
        return plan, partial(loss_func, batch["loss_mask"], training=training)
    output = model(*given, labels=batch["labels"])
    if OPTIONS in WITH_FP4[int(os.environ.get("TINY_BREAK", "1")) - 1 :]:
        output = output * math.inf
    return output, partial(loss_func, batch["loss_mask"], training=training)


def datasets_provider(samples: list[int], vp_stage: int | None = None) -> Any:
    args = get_args()
    return tuple(
        MadeUpText(max(n, 1), args.seq_length, args.vocab_size, split)
        for n, split in zip(samples, Split, strict=True)
    )


def recipes() -> dict[str, str]:
    """What each module of Transformer Engine ran its last forward in, by its global name."""
    found = {}
    for model in MODELS:
        for path, layer in model.named_modules():
            match = re.fullmatch(r"(\w+)\.layers\.\d+", path)
            if match is None:
                continue
            for name, module in layer.named_modules():
                if hasattr(module, "fp8_meta"):
                    recipe = type(module.fp8_meta["recipe"]).__name__ if module.fp8 else "bf16"
                    found[f"{match[1]}.layers.{layer.layer_number - 1}.{name}"] = recipe
    return found


def write_results() -> None:
    digest = hashlib.sha256()
    quantized = []
    for model in MODELS:
        for name, parameter in model.named_parameters():
            own = getattr(parameter, "to_local", parameter.detach)().detach()  # FSDP's shard
            if type(own).__module__.startswith("transformer_engine"):  # stored quantized
                quantized.append(name)
                own = own.dequantize()
            digest.update(own.contiguous().view(torch.uint8).numpy().tobytes())
    results = {"weights": digest.hexdigest(), "losses": LOSSES, "evaluated": EVALUATED}
    results["quantized"] = quantized
    results["recipes"] = recipes()
    folder = Path(os.environ["TINY_RESULTS"])
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(results))


def train() -> None:
    arguments = parse_and_validate_args()
    pretrain(
        pretrain_cfg_container_from_args(arguments),
        train_valid_test_dataset_provider=datasets_provider,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
        model_provider=model_provider,
    )


def forget() -> None:
    """What Megatron's in-process restart does between two trainings."""
    destroy_global_state()
    torch.distributed.destroy_process_group()
    for seen in (MODELS, LOSSES, EVALUATED):
        seen.clear()
    os.environ["MASTER_PORT"] = os.environ["TINY_RESTART"]


if __name__ == "__main__":
    datasets_provider.is_distributed = True
    train()
    if "TINY_RESTART" in os.environ:
        forget()
        train()
    write_results()

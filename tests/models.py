"""Small models with the same weights, of Transformer Engine's linears or of Megatron's own.

Tests that train build theirs with the package's trainer (tests/distributed/small_model.py); the
scripts pretrain_tiny.py and train_recipe.py build theirs as users of Megatron do.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.quantization.quant_config import RecipeConfig
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_snip.config import SnipConfig
from megatron_snip.linears.auto_formats import resolve_formats
from megatron_snip.linears.model import PlannedModel
from megatron_snip.linears.runtime import MicrobatchTokens
from megatron_snip.options import Option
from megatron_snip.run.plans import RunPlans
from megatron_snip.run.step import TrainingStep
from megatron_snip.topology import Topology

DEVICE = "cuda" if os.environ.get("SNIP_TE_REAL") == "1" else "cpu"
FP32: dict[str, Any] = {"bf16": False, "params_dtype": torch.float32}
SEQUENCE, BATCH = 16, 2
"""32 tokens a microbatch: what every recipe of Transformer Engine accepts."""

EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
    "moe_ffn_hidden_size": 96,
}

LATENT: dict[str, Any] = {
    "multi_latent_attention": True,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_head_dim": 32,
    "qk_pos_emb_head_dim": 32,
    "v_head_dim": 32,
    "rope_type": "rope",
}


@contextmanager
def alone(backend: str) -> Iterator[None]:
    """Megatron's parallel state of size 1, on GPU 0 if the backend is nccl."""
    if backend == "nccl":
        torch.cuda.set_device(0)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def build(te: bool = True, grouped: bool = False, **changes: Any) -> GPTModel:
    """A model of two layers; keywords go to its TransformerConfig."""
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    torch.manual_seed(1)
    values = {
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "num_layers": 2,
        "hidden_size": 64,
        "ffn_hidden_size": 96,
        "num_attention_heads": 2,
        "num_query_groups": 2,  # Transformer Engine's attention wants it
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
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    is_latent = "multi_latent_attention" in changes
    config = (MLATransformerConfig if is_latent else TransformerConfig)(**{**values, **changes})
    spec_of = get_gpt_layer_with_transformer_engine_spec if te else get_gpt_layer_local_spec
    extra = {} if te else {"normalization": config.normalization}
    extra |= {"multi_latent_attention": True} if is_latent else {}
    spec = spec_of(num_experts=config.num_moe_experts, moe_grouped_gemm=grouped, **extra)
    mtp = get_gpt_mtp_block_spec(config, spec, te) if config.mtp_num_layers else None
    model = GPTModel(
        config,
        spec,
        vocab_size=32,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        mtp_block_spec=mtp,
    )
    return model.to(DEVICE, config.params_dtype)


_FUSED = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_bias": "input_layernorm.bias",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    "mlp.linear_fc1.layer_norm_bias": "pre_mlp_layernorm.bias",
}


def local_name(name: str) -> str:
    """How a parameter of Transformer Engine's linears is called in Megatron's own."""
    for fused, plain in _FUSED.items():
        name = name.replace(fused, plain)
    if ".experts.linear_" in name:  # ...experts.linear_fc1.weight2
        head, tail = name.rsplit(".weight", 1)
        expert, module = head.rsplit(".experts.", 1)
        return f"{expert}.experts.local_experts.{tail}.{module}.weight"
    return name


@torch.no_grad()
def copy_weights(te: GPTModel, local: GPTModel) -> None:
    """Give both models the same random weights, norms' included."""
    generator = torch.Generator().manual_seed(5)
    there = dict(local.named_parameters())
    for name, parameter in te.named_parameters():
        noise = torch.empty_like(parameter).normal_(0.0, 0.1, generator=generator)
        parameter.copy_(noise + 1.0 if name.endswith("norm_weight") else noise)
        there.pop(local_name(name)).copy_(parameter)
    assert not there


def batches(seed: int = 3) -> Iterator[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        tokens = torch.randint(0, 32, (BATCH, SEQUENCE + 1), generator=generator).to(DEVICE)
        yield {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def forward_step(data: Any, model: Any) -> Any:
    batch = next(data)
    positions = torch.arange(SEQUENCE, device=DEVICE).expand(BATCH, -1)
    output = model(batch["tokens"], positions, None, labels=batch["labels"])

    def loss(values: torch.Tensor) -> Any:
        mean = values.float().mean()
        return mean, {"lm loss": mean.detach().clone()}

    return output, loss


def training(model: Any, num_microbatches: int = 2, **changes: Any) -> TrainingStep:
    """A step's forward-backward on the same data each time."""
    kwargs = {
        "forward_step_func": forward_step,
        "data_iterator": batches(),
        "model": [model],
        "num_microbatches": num_microbatches,
        "seq_length": SEQUENCE,
        "micro_batch_size": BATCH,
        "forward_only": False,
    }
    return TrainingStep(get_forward_backward_func(), {**kwargs, **changes})


def losses(model: Any, num_microbatches: int = 2) -> list[float]:
    """Run a step; gradients add up in `.grad`."""
    results = training(model, num_microbatches).run()
    return [float(next(iter(result.values()))) for result in results]


def by_name(model: PlannedModel) -> dict[str, Any]:
    """Modules of the linears."""
    return {linear.name: linear.module for linear in model.linears}


def ran(model: PlannedModel) -> set[tuple[str, ...]]:
    """Recipes of all GEMMs that ran."""
    return {recipes for module in by_name(model).values() for recipes in module.seen}


Choice = str | Callable[[str], str]
"""An option, or what finds it for a linear's name."""


def assignment(model: PlannedModel, choice: Choice) -> dict[str, Option]:
    """The option of each linear, as a plan gives it."""
    choose = (lambda _: choice) if isinstance(choice, str) else choice
    return {info.name: Option.parse(choose(info.name)) for info in model.job.linears}


def planned(model: Any, choice: Choice = "bf16", **settings: Any) -> PlannedModel:
    """A model under a plan; keywords go to PlannedModel."""
    under = PlannedModel([model], Topology(), **{"seed": 7, **settings})
    under.install()
    under.apply(assignment(under, choice))
    return under


def ours(caplog: Any) -> list[Any]:
    """This package's log records; Megatron's releases log warnings of their own."""
    return [record for record in caplog.records if record.name.startswith("megatron_snip")]


def resolved(model: Any, **settings: Any) -> SnipConfig:
    """The settings with the formats that `auto` means for a model."""
    config = SnipConfig(**settings)
    under = PlannedModel([model], Topology(), 7, config.backend)
    return resolve_formats(config, under.job, under.refusals_of)[0]


def run_plans(model: Any, tokens: int | None = None, **settings: Any) -> RunPlans:
    """The plans of a run of one rank on a model."""
    config = SnipConfig(**settings)
    under = PlannedModel([model], Topology(), 7, config.backend, MicrobatchTokens(tokens))
    return RunPlans(config, under, train_iters=None, calibration_cache=None)


def recipe_file(rules: dict[str, str], **recipes: dict[str, Any]) -> RecipeConfig:
    """What Megatron reads in a precision file: {pattern: name of a recipe}; `bf16` is one."""
    configs = {}
    for name, recipe in {"bf16": {}, **recipes}.items():
        kind = {"transformer_engine_config_type": "TEQuantizationParams"}
        configs[name] = {**kind, "training_recipe": recipe}
    matchers = {
        pattern: {"type": "glob", "pattern": pattern, "config": name, "enabled": True}
        for pattern, name in rules.items()
    }
    return RecipeConfig.from_config_dict({"configs": configs, "matchers": matchers})

"""Why Transformer Engine cannot run an option: on a machine (`te_refusal`), in a linear too.

`linear_refusal` asks in the order of the sections below; the first reason counts. What a model's
linears can run, and what fixes them, is in `linears/availability.py`.
"""

import os
from typing import Any

import torch

from megatron_snip.formats import get_format
from megatron_snip.linears.te.delayed_wgrad import delays_wgrad
from megatron_snip.linears.te.machine import (
    OVERRIDE,
    RECIPES_PER_GEMM,
    RECIPES_PER_GEMM_IN_EXPERTS,
    Machine,
    forward_only,
    te_recipe,
    te_support,
)
from megatron_snip.linears.te.modules import gathers_input, is_grouped, weights_of
from megatron_snip.linears.te.recipe import TERecipe
from megatron_snip.linears.te.recipe_table import RECIPES, JobPrecision, recipe_of
from megatron_snip.linears.te.stored_weight import StoredWeights
from megatron_snip.options import Option


def linear_refusal(
    module: Any,
    option: Option,
    machine: Machine,
    job: TERecipe,
    *,
    is_expert: bool,
    microbatch_tokens: int | None,
    stored: StoredWeights | None,
) -> str | None:
    """Return why a linear cannot run an option other than the job's own, or None if it can.

    Args:
        module: a Transformer Engine linear.
        option: the option.
        machine: what it runs on.
        job: what the job itself runs the linear in.
        is_expert: whether it is an expert's.
        microbatch_tokens: tokens of a microbatch that enter it, over all ranks; None if they vary.
        stored: its weights, where the job stores them quantized, or None.
    """
    reason = te_refusal(option, machine)
    if reason is not None:
        return reason
    recipe = te_recipe(option, machine)
    if stored is not None:
        reason = stored_refusal(module, recipe, job, stored.gets_exact)
        if reason is not None:
            return reason
    if is_grouped(module) and not recipe.is_uniform:
        reason = machine.te_unavailable.get(RECIPES_PER_GEMM_IN_EXPERTS)
        if reason is not None:
            return f"{option}: Transformer Engine {machine.te_version} {reason}"
    rotated = [name for name in recipe if RECIPES[name].quantization.wgrad_hadamard]
    dtype = weights_of(module)[0].dtype
    if rotated and dtype != torch.bfloat16:
        # The random Hadamard transform is a kernel for BF16 (C++, `quantize_impl`).
        text = str(dtype).removeprefix("torch.")
        needs = f"Transformer Engine's {rotated[0]} needs BF16"
        return f"{option}: {needs} and got {text}; add --bf16"
    reason = gather_refusal(module, option, recipe)
    if reason is not None:
        return reason
    return shape_refusal(module, is_expert, recipe, microbatch_tokens)


# ---- the machine, whatever the linear ------------------------------------------------------------


def te_refusal(option: Option, machine: Machine) -> str | None:
    """Return why Transformer Engine cannot run an option on a machine, or None if it can."""
    for name in option.formats:
        found, text = te_support(name, machine)
        if not found:
            return f"{name} on {machine}: {text}"
    if machine.backward_override and option != forward_only(option):
        return (
            f"{option}: {OVERRIDE}={machine.backward_override} runs dgrad and wgrad in BF16; "
            f"{forward_only(option)} says so"
        )
    recipe = te_recipe(option, machine)
    if recipe.is_uniform:
        return None
    for name in recipe:
        if not RECIPES[name].per_gemm:
            return f"{option}: {name} takes one recipe for all three GEMMs of a linear"
    if RECIPES_PER_GEMM in machine.te_unavailable:
        reason = machine.te_unavailable[RECIPES_PER_GEMM]
        return f"{option}: Transformer Engine {machine.te_version} {reason}"
    return None


# ---- weights that are stored quantized -----------------------------------------------------------


def stored_refusal(module: Any, recipe: TERecipe, job: TERecipe, gets_exact: bool) -> str | None:
    """Return why a linear's stored weights exclude a recipe, or None.

    Args:
        module: a Transformer Engine linear whose weights are stored quantized.
        recipe: what a plan gives the linear.
        job: what the job runs it in, which is also how its weights are stored.
        gets_exact: whether a copy of the weight in high precision is made before it is quantized.
    """
    reason = copied_weight_refusal(module)
    if reason is not None:
        return reason
    if gets_exact or {recipe.fprop, recipe.dgrad} <= {"bf16", job.fprop}:
        return None
    return f"weights are stored in {job.fprop}: fprop and dgrad run that or bf16"


def copied_weight_refusal(module: Any) -> str | None:
    """Return why the gradient of a stored weight's copy would not reach the parameter, or None.

    A delayed weight gradient is computed when the module no longer multiplies the copy. Without
    fused accumulation Transformer Engine (`backward_dw`) then gives it to a dequantized weight,
    which it drops.
    """
    if delays_wgrad(module) and not module.fuse_wgrad_accumulation:
        return (
            "weights are stored quantized, and their gradients are delayed, so this needs "
            "Megatron's gradient accumulation fusion"
        )
    return None


# ---- an input that is gathered -------------------------------------------------------------------


def gather_refusal(module: Any, option: Option, recipe: TERecipe) -> str | None:
    """Return why wgrad cannot run on the input that is gathered, or None if it can.

    Under sequence parallelism Transformer Engine quantizes a rank's tokens, and gathers them again
    in the backward. If fprop and wgrad have one recipe, it gathers what was quantized for wgrad.
    Else it dequantizes one of the two, gathers that, and quantizes the result for wgrad (2.20):

        LayerNormLinear    fprop's
        Linear             fprop's if the weight's quantizer `supports_only_rowwise_all_gather`:
                           fprop has a scale per tensor, or dgrad is NVFP4 and fprop is not;
                           else wgrad's

    What fprop has rounded off is lost for wgrad. In a format of fewer bits that is little: NVFP4
    after FP8 has 3 to 10 % more squared error than NVFP4 alone. In one of as many bits the error
    can be more than twice that of the statistics, which round once. What is NVFP4 for wgrad cannot
    be dequantized: the first backward raises NotImplementedError.

    Args:
        module: a Transformer Engine linear.
        option: the option that is to run.
        recipe: the recipe that runs the option.
    """
    if not gathers_input(module):
        return None
    for setting in (*RECIPES[recipe.fprop].variables, *RECIPES[recipe.wgrad].variables):
        if setting.is_active(os.environ) and not setting.is_gathered:
            return (
                f"{option}: under sequence parallelism Transformer Engine cannot gather an input "
                f"with {setting.effect} ({setting.variable})"
            )
    if recipe.fprop == recipe.wgrad:
        return None
    has_norm = getattr(module, "layer_norm_weight", None) is not None
    if has_norm or _weight_keeps_rows(recipe):
        if get_format(option.fprop).bits > get_format(option.wgrad).bits:
            return None
        return (
            f"{option}: under sequence parallelism Transformer Engine gathers the input as fprop "
            "quantized it, so wgrad needs fprop's format or one of fewer bits"
        )
    if RECIPES[recipe.wgrad].dequantizes_columns:
        return None
    return (
        f"{option}: under sequence parallelism Transformer Engine cannot gather an input that is "
        f"{recipe.wgrad} in wgrad alone; {recipe.wgrad} in fprop or dgrad as well, or another "
        "format in wgrad"
    )


def _weight_keeps_rows(recipe: TERecipe) -> bool:
    """Return whether the weight's quantizer `supports_only_rowwise_all_gather`."""
    if RECIPES[recipe.fprop].quantization.has_tensor_scale:
        return True
    return recipe.fprop != recipe.dgrad and not RECIPES[recipe.dgrad].dequantizes_columns


# ---- shapes --------------------------------------------------------------------------------------


def shape_refusal(
    module: Any, is_expert: bool, recipe: TERecipe, microbatch_tokens: int | None = None
) -> str | None:
    """Return why a linear's shapes do not fit a recipe, or None if they do.

    A dense linear's tokens are those of the microbatch, divided among context-parallel ranks and,
    under sequence parallelism, tensor-parallel ones (a rank quantizes its own part). An expert's
    tokens depend on the router, and Megatron pads them only where the run's default is quantized,
    for that default.

    Args:
        module: a Transformer Engine linear.
        is_expert: whether it is an expert's.
        recipe: what it is to run.
        microbatch_tokens: tokens of a microbatch before they are divided; None if they vary.
    """
    shape = tuple(weights_of(module)[0].shape)
    multiple = max(RECIPES[name].dim_multiple for name in recipe)
    if any(size % multiple for size in shape):
        return f"its weight's shard {shape} is not a multiple of {multiple} as {recipe} needs"
    if not is_expert:
        reason = token_refusal(module, recipe, microbatch_tokens)
        return reason and f"{reason}; change --micro-batch-size or --seq-length"
    needed = max(RECIPES[name].token_multiple for name in recipe)
    padded = padded_tokens(module.config)
    if needed == 1 or (padded > 0 and padded % needed == 0):
        return None
    padding = f"padded to {padded}" if padded else "not padded"
    return (
        f"experts' tokens are {padding} and {recipe} needs multiples of {needed}: Megatron pads "
        "for the job's own recipe, so give it --fp8-format or --fp4-format with that recipe"
    )


def token_refusal(module: Any, recipe: TERecipe, microbatch_tokens: int | None) -> str | None:
    """Return why a dense linear cannot run a recipe on a microbatch, or None if it can.

    The arguments are those of `shape_refusal`.
    """
    multiple = max(RECIPES[name].dim_multiple for name in recipe)
    config = module.config
    parts = int(getattr(config, "context_parallel_size", 1))
    if getattr(config, "sequence_parallel", False):
        parts *= int(config.tensor_model_parallel_size)
    if multiple == 1 or not microbatch_tokens or microbatch_tokens % (parts * multiple) == 0:
        return None
    divided = f" over {parts} ranks" if parts > 1 else ""
    return (
        f"{recipe} needs a multiple of {multiple} tokens on each rank, and a microbatch has "
        f"{microbatch_tokens}{divided}"
    )


def padded_tokens(config: Any) -> int:
    """Return what Megatron pads an expert's tokens to a multiple of; 0 where it does not."""
    job = JobPrecision.of(config)
    if not job.kind:
        return 0
    # Where experts run fused operations Megatron pads for their kernels, whatever the recipe.
    if getattr(config, "use_transformer_engine_op_fuser", False):
        return 256
    # Megatron pads for a custom recipe as for one that it knows.
    padded_as = recipe_of(job) or ("blockwise" if job.kind == "fp8" else "nvfp4")
    return RECIPES[padded_as].token_multiple

"""Megatron's settings that SNIP cannot run with, each with the reason and what to change.

With them a linear would multiply other tensors than SNIP sees, or an iteration could not be
measured or repeated. The plan would then be logged and not run.
"""

import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch

from megatron_snip.errors import UnsupportedError, listing
from megatron_snip.linears.te.modules import have_te
from megatron_snip.patches.fast_flags import FAST_FLAGS
from megatron_snip.patches.flag_rows import FlagRow, given


def _te_is_missing(args: Namespace) -> bool:
    asked = getattr(args, "transformer_impl", None) == "transformer_engine"
    return asked and not have_te()


def _inspects_tensors(args: Namespace) -> bool:
    """Return whether a recipe turns nvidia-dlfw-inspect on, or the script has done so."""
    api: Any = sys.modules.get("nvdlfw_inspect.api")
    return given("tensor_inspect")(args) or getattr(api, "DEBUG_MANAGER", None) is not None


def _shards_weights(args: Namespace) -> bool:
    names = ("gtp_weight_remat_size", "expert_gtp_weight_remat_size")
    return any(int(getattr(args, name, None) or 1) > 1 for name in names)


def _has_grouped_tensors(args: Namespace) -> bool:
    if given("moe_single_grouped_weight")(args):
        return True
    # With the fuser Megatron (after 0.19) sets it itself, and fused operations read it alone.
    is_fused = given("use_transformer_engine_op_fuser")(args)
    return given("moe_use_grouped_tensor")(args) and not is_fused


def _sends_quantized_tokens(args: Namespace) -> bool:
    names = ("moe_dispatch_fwd_dtype", "moe_combine_bwd_dtype")
    return any(getattr(args, name, "bf16") != "bf16" for name in names)


def _has_static_nccl_ep(args: Namespace) -> bool:
    if getattr(args, "moe_flex_dispatcher_backend", None) != "ncclep":
        return False
    static_shape = getattr(args, "moe_ncclep_static_shape", None)
    if static_shape is not None:  # 0.19, where the capacity factor alone is no static shape
        return bool(static_shape)
    return given("moe_expert_rank_capacity_factor")(args)


TE_IS_MISSING = FlagRow(
    "--transformer-impl transformer_engine (Megatron's default)",
    _te_is_missing,
    plans="refuses",
    text="Transformer Engine cannot be imported",
    remedy="install it, or give --transformer-impl local",
)

# Where a flag reaches the linears, they refuse it as well: a loop of one's own has no flags to
# check. `weights_of` in linears/te/modules.py refuses one tensor of all experts' weights, and
# `_quantizable` in linears/megatron_linear.py runs in BF16 what is gathered inside the GEMM.
INCOMPATIBLE_FLAGS: tuple[FlagRow, ...] = (
    TE_IS_MISSING,
    FlagRow(
        "--fp16",
        given("fp16"),
        plans="refuses",
        text="SNIP measures and quantizes BF16 and FP32 tensors",
        remedy="use --bf16",
    ),
    FlagRow(
        "--(expert-)tensor-parallel-num-weight-shards or --gtp-weight-remat-size above 1",
        _shards_weights,
        plans="refuses",
        text="weights are gathered inside the GEMM, and SNIP sees only a shard",
        remedy="set it to 1",
    ),
    FlagRow(
        "--moe-use-grouped-tensor or --moe-single-grouped-weight",
        _has_grouped_tensors,
        plans="refuses",
        text="the rows of experts are padded or their weights are one tensor",
    ),
    FlagRow(
        "--moe-dispatch-fwd-dtype or --moe-combine-bwd-dtype mxfp8",
        _sends_quantized_tokens,
        plans="refuses",
        text="experts get tokens or gradients that are quantized before they are sent, which only "
        "fused operations read",
        remedy="set both to bf16",
    ),
    FlagRow(
        "--moe-flex-dispatcher-backend ncclep with static shapes (--moe-ncclep-static-shape in "
        "0.19, --moe-expert-rank-capacity-factor in 0.20)",
        _has_static_nccl_ep,
        plans="refuses",
        text="a measured iteration needs buffers without left-over rows, and another NCCL group "
        "for them",
        remedy="drop the static shapes, or use hybridep",
    ),
    FlagRow(
        "--hybrid-context-parallel",
        given("hybrid_context_parallel"),
        plans="refuses",
        text="microbatches differ in length and number, so gradients cannot be scaled to the "
        "batch's",
    ),
    FlagRow(
        "kitchen (--kitchen-config-file, --kitchen-recipe-number) or ModelOpt (--modelopt-enabled)",
        given("kitchen_config_file", "kitchen_recipe_number", "modelopt_enabled"),
        plans="refuses",
        text="it chooses the precision of the same linears",
    ),
    FlagRow(
        "--perform-rl-step",
        given("perform_rl_step"),
        plans="refuses",
        text="rollouts and training would run the same model under different plans",
        remedy="train without RL",
    ),
    FlagRow(
        "peft (LoRA, DoRA)",
        given("peft"),
        plans="refuses",
        text="adapters wrap the linears, and what they wrap is not trained",
        remedy="train all weights",
    ),
    FlagRow(
        "distillation (a teacher in Megatron-Bridge's model)",
        given("teacher"),
        plans="refuses",
        text="linears of the teacher run in the same iteration and are not trained",
        remedy="train without a teacher",
    ),
    FlagRow(
        "dist.use_decentralized_pg (Megatron-Bridge)",
        given("use_decentralized_pg"),
        plans="refuses",
        text="statistics are reduced over Megatron-Core's process groups, and it makes others",
        remedy="set it to false",
    ),
    FlagRow(
        "tensor_inspect (nvidia-dlfw-inspect)",
        _inspects_tensors,
        plans="refuses",
        text="its features can change or switch off the quantization of a linear, and SNIP does "
        "not see that",
        remedy="turn it off; SNIP writes statistics of each linear's tensors (health/)",
    ),
    FlagRow(
        "--megatron-fsdp-version 2",
        lambda args: getattr(args, "megatron_fsdp_version", 1) == 2,
        plans="refuses",
        text="SNIP never ran with its way to split weights and gradients over ranks",
        remedy="use version 1",
    ),
)
"""Refused in every run; none of the published recipes has one."""

UNPLANNED_MODULES = {
    "GroupedMLP": "drop --moe-use-legacy-grouped-gemm, or under --transformer-impl local "
    "--moe-grouped-gemm; Transformer Engine's grouped experts (TEGroupedMLP) are planned",
    "TEFusedMLPWithGroupedLinear": "drop --use-grouped-gemm-for-dense-mlp (Megatron-Bridge: "
    "dense_grouped_gemm); the other MLPs of --use-transformer-engine-op-fuser are planned",
}
"""Classes of modules whose GEMMs are not in linear modules -> what to do.

GroupedMLP is Megatron's own, last in 0.16: TEGroupedMLP has linears. TEFusedMLPWithGroupedLinear is
in 0.18 and later. Its fused operations open an autocast of MXFP8 themselves, in every job, and read
the rows of gate and up in turns of 32. So no plan changes them, and its two linears, called as
those of a TEFusedMLP are, would compute another MLP.
"""


def check_flags(args: Namespace) -> tuple[FlagRow, ...]:
    """Return the rows of Megatron's settings that hold, in the order of the tables.

    Args:
        args: Megatron's namespace.

    Raises:
        UnsupportedError: a line for each setting that SNIP cannot run with: the flag, the reason
            and the remedy.
    """
    active = tuple(row for row in (*INCOMPATIBLE_FLAGS, *FAST_FLAGS) if row.is_on(args))
    refusals = [row.refusal for row in active if row.refusal is not None]
    if refusals:
        raise UnsupportedError(*refusals)
    return active


_OF_ARGUMENTS = frozenset({"transformer_impl"})
"""What a script that builds its own model decides by its arguments: its config has a default."""


def running_settings(args: Namespace, config: Any) -> Namespace:
    """Return Megatron's settings as the built model runs them.

    Megatron's own configs set some of them: from deprecated flags, and where one implies another.

    Args:
        args: Megatron's namespace.
        config: the model's TransformerConfig, whose values win.
    """
    own = {name: value for name, value in vars(config).items() if name not in _OF_ARGUMENTS}
    return Namespace(**{**vars(args), **own})


def check_modules(model: Sequence[torch.nn.Module]) -> None:
    """Check what only the built model shows.

    Raises:
        UnsupportedError: a line for each class: where the first one is, and the remedy.
    """
    paths: dict[str, list[str]] = {}
    for chunk in model:
        for path, module in chunk.named_modules():
            paths.setdefault(type(module).__name__, []).append(path)
    refusals = [
        f"--snip cannot plan {listing(paths[kind], 1)}: the GEMMs of {kind} are not in linear "
        f"modules; {remedy}"
        for kind, remedy in UNPLANNED_MODULES.items()
        if kind in paths
    ]
    if refusals:
        raise UnsupportedError(*refusals)

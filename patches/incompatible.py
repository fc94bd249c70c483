"""Megatron's settings that SNIP cannot run with, each with the reason and what to change.

With them a linear would multiply other tensors than SNIP sees, or an iteration could not be
measured or repeated. The plan would then be logged and not run.

Read in Megatron-LM 0.16 and 0.19 and allowed: `--overlap-moe-expert-parallel-comm` (the schedule
calls the same linears, one forward and one backward at a time, and Megatron repeats iterations
under it too), except in an FP8 or FP4 run.
"""

import importlib
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron_snip.errors import UnsupportedError
from megatron_snip.linears.te.modules import EXTENSION


@dataclass(frozen=True)
class IncompatibleFlag:
    """One setting.

    Attributes:
        flag: as users write it.
        is_on: whether Megatron's namespace has it; a missing attribute is off.
        reason: what would go wrong.
        remedy: what to do, as an imperative.
    """

    flag: str
    is_on: Callable[[Namespace], bool]
    reason: str
    remedy: str = "drop it"

    @property
    def message(self) -> str:
        """One line."""
        return f"--snip cannot run with {self.flag}: {self.reason}; {self.remedy}"


def _given(*names: str) -> Callable[[Namespace], bool]:
    def is_on(args: Namespace) -> bool:
        values = (getattr(args, name, None) for name in names)
        return any(v is not None and v is not False and v != "none" for v in values)

    return is_on


def _scaled_moments(args: Namespace) -> bool:
    scaled = ("fp16", "fp8", torch.float16, torch.uint8)
    return any(
        getattr(args, name, None) in scaled for name in ("exp_avg_dtype", "exp_avg_sq_dtype")
    )


def _te_is_missing(args: Namespace) -> bool:
    asked = getattr(args, "transformer_impl", None) == "transformer_engine"
    return asked and not importlib.import_module(EXTENSION).HAVE_TE


def _overlaps_in_low_precision(args: Namespace) -> bool:
    return _given("overlap_moe_expert_parallel_comm")(args) and _given("fp8", "fp4")(args)


def _shards_weights(args: Namespace) -> bool:
    names = ("gtp_weight_remat_size", "expert_gtp_weight_remat_size")
    return any(int(getattr(args, name, None) or 1) > 1 for name in names)


INCOMPATIBLE_FLAGS: tuple[IncompatibleFlag, ...] = (
    IncompatibleFlag(
        "--transformer-impl transformer_engine (Megatron's default)",
        _te_is_missing,
        "Transformer Engine cannot be imported",
        "install it, or give --transformer-impl local",
    ),
    IncompatibleFlag(
        "--fp8-param-gather or --fp4-param-gather",
        _given("fp8_param_gather", "fp8_param", "fp4_param_gather", "fp4_param"),
        "weights are stored in that format, so a plan cannot raise their precision",
    ),
    IncompatibleFlag(
        "--fp16", _given("fp16"), "SNIP measures and quantizes BF16 and FP32 tensors", "use --bf16"
    ),
    IncompatibleFlag(
        "--use-transformer-engine-op-fuser",
        _given("use_transformer_engine_op_fuser"),
        "fused operations do not call the linears",
    ),
    IncompatibleFlag(
        "--tp-comm-overlap",
        _given("tp_comm_overlap"),
        "its communication buffers have one precision for the complete run",
    ),
    IncompatibleFlag(
        "CUDA graphs (--cuda-graph-impl)",
        _given("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph"),
        "a captured graph repeats the plan under which it was captured",
        "use --cuda-graph-impl none",
    ),
    IncompatibleFlag(
        "--use-megatron-fsdp or --use-torch-fsdp2",
        _given("use_megatron_fsdp", "use_custom_fsdp", "use_torch_fsdp2"),
        "it moves parameters and gradients out of the modules between layers",
        "use --use-distributed-optimizer instead",
    ),
    IncompatibleFlag(
        "--delay-wgrad-compute or --overlap-dispatch-backward-with-experts-wgrad",
        _given("delay_wgrad_compute", "overlap_dispatch_backward_with_experts_wgrad"),
        "weight gradients move out of the backward pass, where simulated linears make them",
    ),
    IncompatibleFlag(
        "--overlap-moe-expert-parallel-comm in an FP8 or FP4 run",
        _overlaps_in_low_precision,
        "Megatron frees the experts' BF16 inputs after forward, and a plan may run one in BF16",
        "drop it, or drop --fp8-format and --fp4-format",
    ),
    IncompatibleFlag(
        "--(expert-)tensor-parallel-num-weight-shards or --gtp-weight-remat-size above 1",
        _shards_weights,
        "weights are gathered inside the GEMM, and SNIP sees only a shard",
        "set it to 1",
    ),
    IncompatibleFlag(
        "--moe-use-grouped-tensor or --moe-single-grouped-weight",
        _given("moe_use_grouped_tensor", "moe_single_grouped_weight"),
        "the rows of experts are padded or their weights are one tensor",
    ),
    IncompatibleFlag(
        "--moe-expert-rank-capacity-factor",
        _given("moe_expert_rank_capacity_factor"),
        "when experts overflow, Megatron repeats forward and backward, and both would be measured",
    ),
    IncompatibleFlag(
        "--hybrid-context-parallel",
        _given("hybrid_context_parallel"),
        "microbatches differ in length and number, so gradients cannot be scaled to the batch's",
    ),
    IncompatibleFlag(
        "kitchen (--kitchen-config-file, --kitchen-recipe-number) or ModelOpt (--modelopt-enabled)",
        _given("kitchen_config_file", "kitchen_recipe_number", "modelopt_enabled"),
        "it chooses the precision of the same linears",
    ),
    IncompatibleFlag(
        "--perform-rl-step",
        _given("perform_rl_step"),
        "rollouts and training would run the same model under different plans",
        "train without RL",
    ),
    IncompatibleFlag(
        "--exp-avg-dtype or --exp-avg-sq-dtype fp16 or fp8",
        _scaled_moments,
        "SNIP reads the optimizer's moments, and these are stored scaled",
        "use fp32 or bf16",
    ),
)
"""In the order in which they are checked."""

UNPLANNED_MODULES = {
    "GroupedMLP": "drop --moe-grouped-gemm",
    "TEFusedMLP": "drop --use-transformer-engine-op-fuser",
}
"""Classes of modules that multiply without linears -> what to do."""


def check_flags(args: Namespace) -> None:
    """Check Megatron's settings.

    Raises:
        UnsupportedError: one line with the flag, the reason and the remedy.
    """
    for incompatible in INCOMPATIBLE_FLAGS:
        if incompatible.is_on(args):
            raise UnsupportedError(incompatible.message)


def check_modules(model: Sequence[torch.nn.Module]) -> None:
    """Check what only the built model shows.

    Raises:
        UnsupportedError: one line with the module, its class and the remedy.
    """
    for chunk in model:
        for path, module in chunk.named_modules():
            kind = type(module).__name__
            if kind in UNPLANNED_MODULES:
                raise UnsupportedError(
                    f"--snip cannot plan {path}: {kind} multiplies without linears; "
                    f"{UNPLANNED_MODULES[kind]}"
                )

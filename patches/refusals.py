"""Combinations of Megatron's settings that SNIP cannot honour: refused by name, with the remedy.

Each is refused because the seam on the linears would not see the weights or activations that are
really multiplied, or because a step cannot be measured or repeated. Silence would mean a plan that
is logged and not run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_snip.errors import UnsupportedError


@dataclass(frozen=True)
class Refusal:
    """One combination.

    Attributes:
        flag: as users write it.
        active: whether the namespace has it; absent attributes are off.
        reason: what would go wrong.
        remedy: what to do, as an imperative.
    """

    flag: str
    active: Callable[[argparse.Namespace], bool]
    reason: str
    remedy: str

    @property
    def message(self) -> str:
        """One line."""
        return f"--snip cannot run with {self.flag}: {self.reason}; {self.remedy}"


def _on(*names: str) -> Callable[[argparse.Namespace], bool]:
    return lambda args: any(bool(getattr(args, name, None)) for name in names)


def _more_than_one(name: str) -> Callable[[argparse.Namespace], bool]:
    return lambda args: int(getattr(args, name, None) or 1) > 1


def _cuda_graphs(args: argparse.Namespace) -> bool:
    graphs = getattr(args, "cuda_graph_impl", None) not in (None, "none")
    return graphs or _on("enable_cuda_graph", "external_cuda_graph")(args)


_SCALED = (torch.float16, torch.uint8)
"""What the optimizer stores moments in together with a scale of its own."""


def _kitchen(args: argparse.Namespace) -> bool:
    names = ("kitchen_config_file", "kitchen_recipe_number")
    return any(getattr(args, name, None) is not None for name in names)


def _scaled_moments(args: argparse.Namespace) -> bool:
    names = ("exp_avg_dtype", "exp_avg_sq_dtype")
    return any(getattr(args, name, None) in ("fp16", "fp8", *_SCALED) for name in names)


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "--fp8-param-gather",
        _on("fp8_param_gather", "fp8_param"),
        "its weights are stored in FP8, so no plan can give them more precision",
        "drop it",
    ),
    Refusal(
        "--fp4-param-gather",
        _on("fp4_param_gather", "fp4_param"),
        "its weights are stored in FP4, so no plan can give them more precision",
        "drop it",
    ),
    Refusal(
        "--fp16",
        _on("fp16"),
        "activations and gradients are measured and quantized from BF16 or FP32",
        "use --bf16",
    ),
    Refusal(
        "--use-transformer-engine-op-fuser",
        _on("use_transformer_engine_op_fuser"),
        "fused operations do not call the linears",
        "drop it",
    ),
    Refusal(
        "--tp-comm-overlap",
        _on("tp_comm_overlap"),
        "its communication buffers are made for one precision",
        "drop it",
    ),
    Refusal(
        "CUDA graphs (--cuda-graph-impl)",
        _cuda_graphs,
        "a captured graph goes on running the plan under which it was captured",
        "use --cuda-graph-impl none",
    ),
    Refusal(
        "--use-megatron-fsdp",
        _on("use_megatron_fsdp", "use_custom_fsdp"),
        "parameters and gradients leave the modules between layers",
        "use --use-distributed-optimizer in place of FSDP",
    ),
    Refusal(
        "--use-torch-fsdp2",
        _on("use_torch_fsdp2"),
        "parameters and gradients leave the modules between layers",
        "use --use-distributed-optimizer in place of FSDP",
    ),
    Refusal(
        "--delay-wgrad-compute",
        _on("delay_wgrad_compute"),
        "weight gradients are computed apart from the backward that SNIP measures",
        "drop it",
    ),
    Refusal(
        "--overlap-moe-expert-parallel-comm",
        _on("overlap_moe_expert_parallel_comm"),
        "its schedule interleaves two microbatches' layers and cannot be replayed for measuring",
        "drop it",
    ),
    Refusal(
        "--gtp-weight-remat-size above 1",
        _more_than_one("gtp_weight_remat_size"),
        "weights are gathered inside the GEMM and only a shard is visible",
        "set it to 1",
    ),
    Refusal(
        "--moe-expert-rank-capacity-factor",
        _on("moe_expert_rank_capacity_factor"),
        "it repeats forward-backward on overflow, which a measuring pass must not",
        "drop it",
    ),
    Refusal(
        "--hybrid-context-parallel",
        _on("hybrid_context_parallel"),
        "microbatches change size within a step and cannot be replayed for measuring",
        "drop it",
    ),
    Refusal(
        "kitchen (--kitchen-config-file, --kitchen-recipe-number)",
        _kitchen,
        "its layers choose their own precision",
        "drop it",
    ),
    Refusal(
        "ModelOpt (--modelopt-enabled)",
        _on("modelopt_enabled"),
        "it quantizes the same linears",
        "drop it",
    ),
    Refusal(
        "--perform-rl-step",
        _on("perform_rl_step"),
        "its rollouts and training steps share the model under different plans",
        "train without RL",
    ),
    Refusal(
        "--exp-avg-dtype or --exp-avg-sq-dtype fp16 or fp8",
        _scaled_moments,
        "its moments are scaled and cannot be read as they are stored",
        "use fp32 or bf16",
    ),
)
"""What is read from flags, in the order in which it is checked."""

UNPLANNED_MODULES: dict[str, str] = {
    "GroupedMLP": "the experts' weights are no linears; drop --moe-grouped-gemm",
    "TEFusedMLP": "fused operations do not call the linears; "
    "drop --use-transformer-engine-op-fuser",
}
"""Classes of modules whose GEMMs no seam sees, by name -> what to do."""


def refuse_settings(args: argparse.Namespace) -> None:
    """Refuse what flags show.

    Raises:
        UnsupportedError: one line that names the flag, the reason and the remedy.
    """
    for refusal in REFUSALS:
        if refusal.active(args):
            raise UnsupportedError(refusal.message)


def refuse_modules(model: Sequence[torch.nn.Module]) -> None:
    """Refuse what only the built model shows.

    Raises:
        UnsupportedError: one line that names the module, its class and the remedy.
    """
    for chunk in model:
        for path, module in chunk.named_modules():
            remedy: Any = UNPLANNED_MODULES.get(type(module).__name__)
            if remedy is not None:
                kind = type(module).__name__
                raise UnsupportedError(f"--snip cannot plan {path} ({kind}): {remedy}")

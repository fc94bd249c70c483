"""Incompatible flags end in one line with the flag, the reason and the remedy."""

import argparse
from typing import Any

import pytest
import torch

from megatron_snip.errors import UnsupportedError
from megatron_snip.patches.incompatible import (
    INCOMPATIBLE_FLAGS,
    IncompatibleFlag,
    check_flags,
    check_modules,
)

ACTIVE: dict[str, dict[str, Any]] = {
    "--transformer-impl transformer_engine (Megatron's default)": {
        "transformer_impl": "transformer_engine"
    },
    "--fp8-param-gather or --fp4-param-gather": {"fp4_param": True},
    "--fp16": {"fp16": True},
    "--use-transformer-engine-op-fuser": {"use_transformer_engine_op_fuser": True},
    "--tp-comm-overlap": {"tp_comm_overlap": True},
    "CUDA graphs (--cuda-graph-impl)": {"cuda_graph_impl": "full_iteration"},
    "--use-megatron-fsdp or --use-torch-fsdp2": {"use_torch_fsdp2": True},
    "--delay-wgrad-compute or --overlap-dispatch-backward-with-experts-wgrad": {
        "overlap_dispatch_backward_with_experts_wgrad": True
    },
    "--overlap-moe-expert-parallel-comm in an FP8 or FP4 run": {
        "overlap_moe_expert_parallel_comm": True,
        "fp8": "e4m3",
    },
    "--(expert-)tensor-parallel-num-weight-shards or --gtp-weight-remat-size above 1": {
        "expert_gtp_weight_remat_size": 2
    },
    "--moe-use-grouped-tensor or --moe-single-grouped-weight": {"moe_single_grouped_weight": True},
    "--moe-expert-rank-capacity-factor": {"moe_expert_rank_capacity_factor": 1.5},
    "--hybrid-context-parallel": {"hybrid_context_parallel": True},
    "kitchen (--kitchen-config-file, --kitchen-recipe-number) or ModelOpt (--modelopt-enabled)": {
        "kitchen_recipe_number": 0
    },
    "--perform-rl-step": {"perform_rl_step": True},
    "--exp-avg-dtype or --exp-avg-sq-dtype fp16 or fp8": {"exp_avg_dtype": torch.float16},
}

HARMLESS = {
    "fp8_param_gather": False,
    "fp16": False,
    "cuda_graph_impl": "none",
    "gtp_weight_remat_size": 1,
    "moe_expert_rank_capacity_factor": None,
    "exp_avg_dtype": torch.float32,
    "exp_avg_sq_dtype": torch.bfloat16,
    "kitchen_recipe_number": None,
    "overlap_moe_expert_parallel_comm": True,
    "data_parallel_sharding_strategy": "optim_grads_params",  # Megatron's default without FSDP
}


@pytest.mark.parametrize("row", INCOMPATIBLE_FLAGS, ids=lambda row: row.flag)
def test_each_is_one_line_with_a_remedy(row: IncompatibleFlag) -> None:
    with pytest.raises(UnsupportedError) as error:
        check_flags(argparse.Namespace(**{**HARMLESS, **ACTIVE[row.flag]}))
    assert str(error.value) == row.message and "\n" not in row.message


def test_ordinary_settings_pass() -> None:
    check_flags(argparse.Namespace(**HARMLESS))
    check_flags(argparse.Namespace())  # a release that has none of these


def test_older_spellings_of_cuda_graphs() -> None:
    for name in ("enable_cuda_graph", "external_cuda_graph"):
        with pytest.raises(UnsupportedError, match="CUDA graphs"):
            check_flags(argparse.Namespace(**{name: True}))


def test_modules_without_linears_are_named_with_their_path() -> None:
    class GroupedMLP(torch.nn.Module):
        pass

    layer = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"experts": GroupedMLP()})})
    check_modules([torch.nn.ModuleDict({"mlp": torch.nn.Linear(1, 1)})])
    with pytest.raises(UnsupportedError, match=r"mlp\.experts: GroupedMLP .*moe-grouped-gemm"):
        check_modules([torch.nn.Linear(1, 1), layer])

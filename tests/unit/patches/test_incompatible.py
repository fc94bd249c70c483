"""Incompatible flags end in one line with the flag, the reason and the remedy."""

import argparse
from typing import Any

import pytest
import torch

from megatron_snip.errors import UnsupportedError
from megatron_snip.patches.incompatible import INCOMPATIBLE_FLAGS, check_flags, check_modules

ACTIVE: list[dict[str, Any]] = [
    {"transformer_impl": "transformer_engine"},
    {"fp4_param": True},
    {"fp16": True},
    {"use_transformer_engine_op_fuser": True},
    {"tp_comm_overlap": True},
    {"cuda_graph_impl": "full_iteration"},
    {"use_torch_fsdp2": True},
    {"overlap_dispatch_backward_with_experts_wgrad": True},
    {"overlap_moe_expert_parallel_comm": True, "fp8": "e4m3"},
    {"expert_gtp_weight_remat_size": 2},
    {"moe_single_grouped_weight": True},
    {"moe_expert_rank_capacity_factor": 1.5},
    {"hybrid_context_parallel": True},
    {"kitchen_recipe_number": 0},
    {"perform_rl_step": True},
    {"exp_avg_dtype": torch.float16},
]
"""Settings that turn on one row after the other."""
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


def test_each_is_one_line_with_a_remedy() -> None:
    for row, settings in zip(INCOMPATIBLE_FLAGS, ACTIVE, strict=True):
        with pytest.raises(UnsupportedError) as error:
            check_flags(argparse.Namespace(**HARMLESS | settings))
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

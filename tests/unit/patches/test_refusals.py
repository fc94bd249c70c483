"""What cannot be combined with SNIP is refused by name, with what to do."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch

from megatron_snip.errors import UnsupportedError
from megatron_snip.patches.refusals import REFUSALS, refuse_modules, refuse_settings

ACTIVE: dict[str, dict[str, Any]] = {
    "--fp8-param-gather": {"fp8_param_gather": True},
    "--fp4-param-gather": {"fp4_param": True},
    "--fp16": {"fp16": True},
    "--use-transformer-engine-op-fuser": {"use_transformer_engine_op_fuser": True},
    "--tp-comm-overlap": {"tp_comm_overlap": True},
    "CUDA graphs (--cuda-graph-impl)": {"cuda_graph_impl": "full_iteration"},
    "--use-megatron-fsdp": {"use_megatron_fsdp": True},
    "--use-torch-fsdp2": {"use_torch_fsdp2": True},
    "--delay-wgrad-compute": {"delay_wgrad_compute": True},
    "--overlap-moe-expert-parallel-comm": {"overlap_moe_expert_parallel_comm": True},
    "--gtp-weight-remat-size above 1": {"gtp_weight_remat_size": 2},
    "--moe-expert-rank-capacity-factor": {"moe_expert_rank_capacity_factor": 1.5},
    "--hybrid-context-parallel": {"hybrid_context_parallel": True},
    "kitchen (--kitchen-config-file, --kitchen-recipe-number)": {"kitchen_recipe_number": 0},
    "ModelOpt (--modelopt-enabled)": {"modelopt_enabled": True},
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
    "data_parallel_sharding_strategy": "optim_grads_params",  # Megatron's default without FSDP
}


def test_every_refusal_is_tested() -> None:
    assert set(ACTIVE) == {refusal.flag for refusal in REFUSALS}


@pytest.mark.parametrize("flag", ACTIVE)
def test_each_is_refused_by_name_with_a_remedy(flag: str) -> None:
    args = argparse.Namespace(**{**HARMLESS, **ACTIVE[flag]})
    with pytest.raises(UnsupportedError) as error:
        refuse_settings(args)
    text = str(error.value)
    (refusal,) = [r for r in REFUSALS if r.flag == flag]
    assert flag in text and refusal.reason in text and text.endswith(refusal.remedy)
    assert "\n" not in text


def test_ordinary_settings_pass() -> None:
    refuse_settings(argparse.Namespace(**HARMLESS))
    refuse_settings(argparse.Namespace())  # a release that has none of these


def test_older_spellings_of_cuda_graphs() -> None:
    for name in ("enable_cuda_graph", "external_cuda_graph"):
        with pytest.raises(UnsupportedError, match="CUDA graphs"):
            refuse_settings(argparse.Namespace(**{name: True}))


def test_modules_without_linears_are_named_with_their_path() -> None:
    class GroupedMLP(torch.nn.Module):
        pass

    layer = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"experts": GroupedMLP()})})
    refuse_modules([torch.nn.ModuleDict({"mlp": torch.nn.Linear(1, 1)})])
    with pytest.raises(UnsupportedError, match=r"mlp\.experts \(GroupedMLP\): .*moe-grouped-gemm"):
        refuse_modules([torch.nn.Linear(1, 1), layer])

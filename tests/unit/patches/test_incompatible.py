"""Each of Megatron's settings that SNIP treats apart: what is refused, in a line each."""

import argparse
import sys
from argparse import Namespace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_snip.errors import UnsupportedError
from megatron_snip.patches.fast_flags import FAST_FLAGS
from megatron_snip.patches.incompatible import (
    INCOMPATIBLE_FLAGS,
    check_flags,
    check_modules,
    running_settings,
)

ACTIVE: dict[str, dict[str, Any]] = {
    "--transformer-impl transformer_engine": {"transformer_impl": "transformer_engine"},
    "--fp16": {"fp16": True},
    "--(expert-)tensor-parallel-num-weight-shards": {"expert_gtp_weight_remat_size": 2},
    "--moe-use-grouped-tensor": {"moe_single_grouped_weight": True},
    "--moe-dispatch-fwd-dtype": {"moe_combine_bwd_dtype": "mxfp8"},
    "--moe-flex-dispatcher-backend ncclep": {
        "moe_flex_dispatcher_backend": "ncclep",
        "moe_ncclep_static_shape": True,
    },
    "--hybrid-context-parallel": {"hybrid_context_parallel": True},
    "kitchen": {"kitchen_recipe_number": 0},
    "--perform-rl-step": {"perform_rl_step": True},
    "peft": {"peft": "lora"},
    "distillation": {"teacher": "provider"},
    "dist.use_decentralized_pg": {"use_decentralized_pg": True},
    "tensor_inspect": {"tensor_inspect": True},
    "--megatron-fsdp-version 2": {"megatron_fsdp_version": 2},
    "--fp8-param-gather with": {
        "fp8_param_gather": True,
        "reuse_grad_buf_for_mxfp8_param_ag": True,
    },
    "--fp8-param-gather or": {"fp4_param": True},
    "--cuda-graph-impl local": {"cuda_graph_impl": "local"},
    "CUDA graphs with": {
        "cuda_graph_impl": "local",
        "cuda_graph_scope": ["full_iteration"],
        "snip_backend": "simulate",
    },
    "--cuda-graph-impl full_iteration": {
        "cuda_graph_impl": "local",
        "cuda_graph_scope": ["full_iteration"],
    },
    "--cuda-graph-impl transformer_engine": {"cuda_graph_impl": "transformer_engine"},
    "--delay-wgrad-compute": {"overlap_dispatch_backward_with_experts_wgrad": True},
    "--overlap-moe": {"overlap_moe_expert_parallel_comm": True, "fp8": "e4m3"},
    "--use-transformer-engine-op-fuser": {"use_transformer_engine_op_fuser": True},
    "--tp-comm-overlap": {"tp_comm_overlap": True},
    "--moe-expert-rank-capacity-factor": {"moe_expert_rank_capacity_factor": 1.5},
    "--use-megatron-fsdp with --fp8": {"use_megatron_fsdp": True, "fp8_param_gather": True},
    "--use-megatron-fsdp with BF16": {"use_megatron_fsdp": True},
    "--use-torch-fsdp2": {"use_torch_fsdp2": True},
}
"""How a row's flag begins -> settings that turn on this row alone."""
HARMLESS = {
    "fp8_param_gather": False,
    "fp16": False,
    "cuda_graph_impl": "none",
    "gtp_weight_remat_size": 1,
    "moe_expert_rank_capacity_factor": None,
    "exp_avg_dtype": torch.uint8,
    "exp_avg_sq_dtype": torch.bfloat16,
    "kitchen_recipe_number": None,
    "moe_dispatch_fwd_dtype": "bf16",
    "overlap_moe_expert_parallel_comm": True,
    "data_parallel_sharding_strategy": "optim_grads_params",  # Megatron's default without FSDP
}


ROWS = (*INCOMPATIBLE_FLAGS, *FAST_FLAGS)


def test_each_setting_turns_on_its_row_and_only_that() -> None:
    assert len(ROWS) == len(ACTIVE)
    for flag, settings in ACTIVE.items():
        (row,) = [row for row in ROWS if row.flag.startswith(flag)]
        args = argparse.Namespace(**HARMLESS | settings)
        refusal = row.refusal
        if refusal is None:
            assert check_flags(args) == (row,)
            continue
        with pytest.raises(UnsupportedError) as error:
            check_flags(args)
        assert error.value.messages == (refusal,) and "\n" not in refusal


def test_inspection_that_a_script_has_turned_on_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    inspector: Any = ModuleType("nvdlfw_inspect.api")
    inspector.DEBUG_MANAGER = None
    monkeypatch.setitem(sys.modules, "nvdlfw_inspect.api", inspector)
    assert check_flags(argparse.Namespace()) == ()
    inspector.DEBUG_MANAGER = "manager"
    with pytest.raises(UnsupportedError, match="--snip cannot run with tensor_inspect"):
        check_flags(argparse.Namespace())


def test_all_refusals_come_at_once() -> None:
    args = argparse.Namespace(fp16=True, perform_rl_step=True, megatron_fsdp_version=2)
    with pytest.raises(UnsupportedError) as error:
        check_flags(args)
    assert [text.split(":")[0] for text in error.value.messages] == [
        "--snip cannot run with --fp16",
        "--snip cannot run with --perform-rl-step",
        "--snip cannot run with --megatron-fsdp-version 2",
    ]


def test_ordinary_settings_pass() -> None:
    assert check_flags(argparse.Namespace(**HARMLESS)) == ()
    assert check_flags(argparse.Namespace()) == ()  # a release without them


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"cuda_graph_impl": "full_iteration"}, "full_iteration"),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]}, "full_iteration"),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"}, "full_iteration"),
        ({"cuda_graph_impl": "transformer_engine"}, "transformer_engine"),
        ({"cuda_graph_impl": "local", "cuda_graph_modules": ["attn"]}, "local"),
    ],
)
def test_spellings_of_cuda_graphs(settings: dict[str, Any], flag: str) -> None:
    found = [row.flag for row in FAST_FLAGS if row.is_on(argparse.Namespace(**settings))]
    assert found == [f"--cuda-graph-impl {flag}"]


@pytest.mark.parametrize(
    ("settings", "is_refused"),
    [
        ({"moe_ncclep_static_shape": False, "moe_expert_rank_capacity_factor": 1.5}, False),
        ({"moe_expert_rank_capacity_factor": 1.5}, True),  # 0.20 has no other flag for it
        ({"moe_expert_rank_capacity_factor": None}, False),
    ],
)
def test_nccl_ep_is_refused_with_static_shapes(settings: dict[str, Any], is_refused: bool) -> None:
    args = argparse.Namespace(moe_flex_dispatcher_backend="ncclep", **settings)
    on = [row.flag for row in INCOMPATIBLE_FLAGS if row.is_on(args)]
    assert bool(on) == is_refused


def test_modules_without_linears_are_named_with_their_path() -> None:
    class GroupedMLP(torch.nn.Module):
        pass

    class TEGroupedMLP(torch.nn.Module):
        pass

    layer = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"experts": GroupedMLP()})})
    check_modules([torch.nn.ModuleDict({"mlp": torch.nn.Linear(1, 1)}), TEGroupedMLP()])
    with pytest.raises(UnsupportedError) as error:
        check_modules([torch.nn.Linear(1, 1), layer])
    (line,) = error.value.messages
    assert "mlp.experts: the GEMMs of GroupedMLP are not in linear modules; drop " in line
    # Under Transformer Engine --moe-grouped-gemm gives experts that are planned.
    assert "--moe-use-legacy-grouped-gemm, or under --transformer-impl local --moe-gr" in line


def test_the_config_that_runs_decides() -> None:
    """Megatron sets it from a flag that is deprecated, or that implies another one."""
    args = Namespace(moe_use_grouped_tensor=False, cuda_graph_impl="none", fp16=False)
    check_flags(args)
    fuser = {"use_transformer_engine_op_fuser": True, "moe_use_grouped_tensor": True}
    (row,) = check_flags(running_settings(args, SimpleNamespace(**fuser)))
    assert row.flag == "--use-transformer-engine-op-fuser"
    for config, text in (
        ({"moe_use_grouped_tensor": True}, "--moe-use-grouped-tensor"),
        ({**fuser, "moe_single_grouped_weight": True}, "--moe-use-grouped-tensor"),
        ({"cuda_graph_impl": "local"}, "--cuda-graph-impl local"),
    ):
        with pytest.raises(UnsupportedError, match=text):
            check_flags(running_settings(args, SimpleNamespace(**config)))
    own = Namespace(transformer_impl="local")
    assert running_settings(own, SimpleNamespace(transformer_impl="x")).transformer_impl == "local"


def test_a_fused_mlp_that_chooses_its_own_recipe_is_refused() -> None:
    """Megatron's class inherits from the one that is planned."""

    class TEFusedMLP(torch.nn.Module):
        pass

    class TEFusedMLPWithGroupedLinear(TEFusedMLP):
        pass

    check_modules([torch.nn.ModuleDict({"mlp": TEFusedMLP()})])
    with pytest.raises(UnsupportedError, match=r"cannot plan mlp: .*--use-grouped-gemm-for-dense"):
        check_modules([torch.nn.ModuleDict({"mlp": TEFusedMLPWithGroupedLinear()})])

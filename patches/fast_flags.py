"""Megatron's settings that make a job faster, and what SNIP does with each.

`docs/megatron.md` has the table, with the number of published recipes that have each setting.
"""

from argparse import Namespace

from megatron_snip.patches.flag_rows import FlagRow, given


def _overlaps_in_low_precision(args: Namespace) -> bool:
    return given("overlap_moe_expert_parallel_comm")(args) and given("fp8", "fp4")(args)


FAST_FLAGS: tuple[FlagRow, ...] = (
    FlagRow(
        "--fp8-param-gather or --fp4-param-gather",
        given("fp8_param_gather", "fp8_param", "fp4_param_gather", "fp4_param"),
        plans="refuses",
        collects="refuses",
        text="weights are stored in that format, so a plan cannot raise their precision",
    ),
    FlagRow(
        "CUDA graphs (--cuda-graph-impl)",
        given("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph"),
        plans="refuses",
        collects="refuses",
        text="a captured graph repeats the plan under which it was captured",
        remedy="use --cuda-graph-impl none",
    ),
    FlagRow(
        "--delay-wgrad-compute or --overlap-dispatch-backward-with-experts-wgrad",
        given("delay_wgrad_compute", "overlap_dispatch_backward_with_experts_wgrad"),
        plans="refuses",
        collects="refuses",
        text="weight gradients move out of the backward pass, where simulated linears make them",
    ),
    FlagRow(
        "--overlap-moe-expert-parallel-comm in an FP8 or FP4 run",
        _overlaps_in_low_precision,
        plans="refuses",
        collects="refuses",
        text="Megatron frees the experts' inputs after forward, and a plan may run one in BF16",
        remedy="drop it, or drop --fp8-format and --fp4-format",
    ),
    FlagRow(
        "--use-transformer-engine-op-fuser",
        given("use_transformer_engine_op_fuser"),
        plans="refuses",
        collects="refuses",
        text="fused operations do not call the linears",
    ),
    FlagRow(
        "--tp-comm-overlap",
        given("tp_comm_overlap"),
        plans="refuses",
        collects="refuses",
        text="its communication buffers have one precision for the complete run",
    ),
    FlagRow(
        "--moe-expert-rank-capacity-factor",
        given("moe_expert_rank_capacity_factor"),
        plans="refuses",
        collects="refuses",
        text="when experts overflow, Megatron repeats the pass, and both would be measured",
    ),
    FlagRow(
        "--use-megatron-fsdp or --use-torch-fsdp2",
        given("use_megatron_fsdp", "use_custom_fsdp", "use_torch_fsdp2"),
        plans="refuses",
        collects="refuses",
        text="it moves parameters and gradients out of the modules between layers",
        remedy="use --use-distributed-optimizer instead",
    ),
)

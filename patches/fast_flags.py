"""Megatron's settings that make a job faster, and what SNIP does with each.

`docs/megatron.md` has the table, with the number of published recipes that have each setting.
"""

from argparse import Namespace

from megatron_snip.patches.flag_rows import FlagRow, given


def _overlaps_in_low_precision(args: Namespace) -> bool:
    return given("overlap_moe_expert_parallel_comm")(args) and given("fp8", "fp4")(args)


def _stores_weights(args: Namespace) -> bool:
    names = ("fp8_param_gather", "fp8_param", "fp4_param_gather", "fp4_param")
    return given(*names)(args)


_has_megatron_fsdp = given("use_megatron_fsdp")


def _gathers_bf16(args: Namespace) -> bool:
    return given("reuse_grad_buf_for_mxfp8_param_ag")(args)


_GRAPHS = ("full_iteration", "transformer_engine")


def _cuda_graphs(args: Namespace) -> str:
    """Return how a job captures CUDA graphs: `none`, `local` (single layers) or one of `_GRAPHS`.

    Before 0.19 `local` with the scope `full_iteration` captures the complete iteration. Megatron
    has put flags that it deprecates in the form of the current ones before.
    """
    scopes: list[object] = []
    for name in ("cuda_graph_modules", "cuda_graph_scope"):
        value = getattr(args, name, None)
        scopes += value if isinstance(value, list) else [value]
    implementation = str(getattr(args, "cuda_graph_impl", None) or "none")
    is_complete = any(str(scope).endswith("full_iteration") for scope in scopes)
    return "full_iteration" if implementation == "local" and is_complete else implementation


def _simulates(args: Namespace) -> bool:
    """Return whether linears are Megatron's own or simulated."""
    is_local = getattr(args, "transformer_impl", None) == "local"
    return is_local or getattr(args, "snip_backend", None) == "simulate"


FAST_FLAGS: tuple[FlagRow, ...] = (
    FlagRow(
        "--fp8-param-gather with --reuse-grad-buf-for-mxfp8-param-ag",
        lambda args: _stores_weights(args) and not _has_megatron_fsdp(args) and _gathers_bf16(args),
        plans="runs",
        text="GEMMs of a linear whose option is not the job's read a copy of the BF16 weight that "
        "Megatron gathers",
        num_recipes=46,
    ),
    FlagRow(
        "--fp8-param-gather or --fp4-param-gather alone",
        lambda args: (
            _stores_weights(args) and not _has_megatron_fsdp(args) and not _gathers_bf16(args)
        ),
        plans="restricts",
        text="weights are stored in the job's format; fprop and dgrad run that format, or BF16 "
        "from the dequantized weight",
        num_recipes=67,
    ),
    FlagRow(
        "--cuda-graph-impl local",
        lambda args: _cuda_graphs(args) == "local",
        plans="refuses",
        text="SNIP cannot drop these graphs of single layers, and hooks of their layers do not run",
        remedy="use --cuda-graph-impl transformer_engine or full_iteration",
    ),
    FlagRow(
        "CUDA graphs with --snip-backend simulate or --transformer-impl local",
        lambda args: _cuda_graphs(args) in _GRAPHS and _simulates(args),
        plans="measures",
        text="a graph would repeat the random numbers with which simulated GEMMs round",
    ),
    FlagRow(
        "--cuda-graph-impl full_iteration",
        lambda args: _cuda_graphs(args) == "full_iteration" and not _simulates(args),
        plans="runs",
        text="a measured iteration runs without the graph; after a new plan the graph is captured "
        "again",
        num_recipes=30,
    ),
    FlagRow(
        "--cuda-graph-impl transformer_engine",
        lambda args: _cuda_graphs(args) == "transformer_engine" and not _simulates(args),
        plans="runs",
        text="a measured iteration runs without graphs; after a plan that changes a captured "
        "linear the graphs are captured again",
        num_recipes=67,
    ),
    FlagRow(
        "--delay-wgrad-compute or --overlap-dispatch-backward-with-experts-wgrad",
        given("delay_wgrad_compute", "overlap_dispatch_backward_with_experts_wgrad"),
        plans="runs",
        text="weight gradients are delayed under every option, simulated ones as well",
        num_recipes=22,
    ),
    FlagRow(
        "--overlap-moe-expert-parallel-comm in an FP8 or FP4 run",
        _overlaps_in_low_precision,
        plans="runs",
        text="the experts' input stays in memory while a plan runs experts in another precision",
        num_recipes=18,
    ),
    FlagRow(
        "--use-transformer-engine-op-fuser",
        given("use_transformer_engine_op_fuser"),
        plans="restricts",
        text="the two linears of an MLP with fused operations have one option; a measured "
        "iteration runs twice, once unfused to be measured and once to train",
        num_recipes=19,
    ),
    FlagRow(
        "--tp-comm-overlap",
        given("tp_comm_overlap"),
        plans="runs",
        text="linears communicate without overlap in a recipe for which Transformer Engine has no "
        "communication buffers",
        num_recipes=18,
    ),
    FlagRow(
        "--moe-expert-rank-capacity-factor",
        given("moe_expert_rank_capacity_factor"),
        plans="runs",
        text="Megatron runs an iteration again without the limit if an expert's tokens exceed it; "
        "a measured iteration runs without the limit at once, with the same result",
        num_recipes=15,
    ),
    FlagRow(
        "--use-megatron-fsdp with --fp8-param-gather or --fp4-param-gather",
        lambda args: _has_megatron_fsdp(args) and _stores_weights(args),
        plans="measures",
        text="a plan needs copies of complete weights from forward to backward, and FSDP frees "
        "these",
        num_recipes=5,
    ),
    FlagRow(
        "--use-megatron-fsdp with BF16 weights",
        lambda args: _has_megatron_fsdp(args) and not _stores_weights(args),
        plans="runs",
        text="a weight is read while its layer runs; gradients are read from their shards",
        num_recipes=3,
    ),
    FlagRow(
        "--use-torch-fsdp2",
        given("use_torch_fsdp2"),
        plans="runs",
        text="as under Megatron-FSDP; Megatron stores no FP8 weights with this flag",
    ),
)

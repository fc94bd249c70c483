"""Megatron's flags that make a job fast or small, as the tests of this tier give them."""

MXFP8 = ["--fp8-format", "e4m3", "--fp8-recipe", "mxfp8"]
NVFP4 = ["--fp4-format", "e2m1", "--fp4-recipe", "nvfp4"]
FUSED_EXPERTS = {"NVTE_CUTEDSL_FUSED_GROUPED_MLP": "1"}
"""The environment in which Megatron 0.19.2 fuses gated experts."""
STORED = "--fp8-param-gather"
GATHERED_BF16 = [*MXFP8, STORED, "--reuse-grad-buf-for-mxfp8-param-ag"]

EXPERT_OVERLAP = ["--overlap-moe-expert-parallel-comm"]
DELAYED_WGRAD = [*EXPERT_OVERLAP, "--delay-wgrad-compute"]
STREAMS = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
"""The environment of both: Megatron asks for several."""

GRAPH = ["--cuda-graph-impl", "full_iteration", "--cuda-graph-warmup-steps", "1"]
GRAPH += ["--no-check-for-nan-in-loss-and-grad"]
GRAPHS = {
    "the iteration": (GRAPH, "captured the training step"),
    "layers": (
        ["--cuda-graph-impl", "transformer_engine", "--cuda-graph-warmup-steps", "1"],
        "captured layers with 16 planned linears",
    ),
}
"""Flags, and what the log says when a graph was captured."""

SMALL = ["--num-layers", "2"]
SHORT = [*SMALL, "--train-iters", "4"]
"""Measured in iteration 3; iteration 4 shows whether that left a trace."""

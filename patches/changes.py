"""The registry of changes: all that SNIP replaces in other packages and in Python itself.

Each entry names what is changed, the file that changes it, why, the upstream issue or code behind
the reason, the releases that need it, and when the entry can go. `megatron-snip doctor --changes`
prints it, with what it found on the machine. A test compares it with the patches and with the
places in the code that set attributes of others.
"""

import pkgutil
from dataclasses import dataclass

from megatron_snip.errors import one_line

LM = "https://github.com/NVIDIA/Megatron-LM"
TE = "https://github.com/NVIDIA/TransformerEngine"
BRIDGE = "https://github.com/NVIDIA-NeMo/Megatron-Bridge"

ON_INSTANCES = "set on modules of the job"
"""What `found` returns of attributes that only instances have."""


@dataclass(frozen=True)
class Change:
    """A reason to change something of another package's.

    Attributes:
        targets: dotted names of what is changed: `package.module:Class.attribute`.
        where: the file that changes it, from the repository's root.
        reason: why SNIP needs it; one sentence.
        upstream: the issue, pull request or code that makes it necessary.
        until: when the entry can go.
        releases: releases of the package that need it.
        on_instances: whether the attribute is set on objects of the job, and not on the class.
    """

    targets: tuple[str, ...]
    where: str
    reason: str
    upstream: str
    until: str
    releases: str = "all"
    on_instances: bool = False

    def found(self) -> str:
        """Return what is there of the targets: `found`, ON_INSTANCES, or what is missing."""
        if self.on_instances:
            return ON_INSTANCES
        missing = []
        for target in self.targets:
            try:
                pkgutil.resolve_name(target)
            except (ImportError, AttributeError) as error:
                missing.append(f"no {target.partition(':')[2]} ({one_line(error)})")
        return "; ".join(missing) or "found"


_LM_LOOP = "until the oldest supported Megatron-LM has the callbacks, and they cover this point"
_BRIDGE_LOOP = "when Megatron-Bridge's callbacks cover this point"
_NO_HOOK = "no hook upstream"

CHANGES = (
    # ---- Megatron-LM's loop ----------------------------------------------------------------------
    Change(
        ("megatron.training.arguments:add_megatron_arguments",),
        "patches/megatron_lm.py",
        "Adds --snip-* flags to the parser of scripts that are not edited.",
        f"{LM}/issues/7266 (callbacks have no point before arguments are parsed)",
        "when Megatron-LM takes argument providers from installed packages",
    ),
    Change(
        (
            "megatron.training.arguments:validate_args",
            "megatron.training.initialize:validate_args",  # before 0.18
        ),
        "patches/megatron_lm.py",
        "Checks SNIP's settings against Megatron's before the model is built.",
        f"{LM}/issues/7266",
        _LM_LOOP,
    ),
    Change(
        ("megatron.training.training:setup_model_and_optimizer",),
        "patches/megatron_lm.py",
        "Attaches SNIP to the model that was built and loaded.",
        f"{LM}/pull/5610",
        _LM_LOOP,
    ),
    Change(
        (
            "megatron.training.training:train_step",
            "megatron.training.training:post_training_step_callbacks",
            "megatron.training.training:evaluate",
            "megatron.training.training:evaluate_and_print_results",
            "megatron.training.training:get_forward_backward_func",
        ),
        "patches/megatron_lm.py",
        "Runs each forward-backward under the plan, again if the guard needs it, and reports the "
        "iteration.",
        f"{LM}/pull/5610 (its callbacks observe a step and cannot run it again)",
        _LM_LOOP,
    ),
    Change(
        (
            "megatron.training.checkpointing:generate_state_dict",
            "megatron.training.checkpointing:_load_base_checkpoint",
        ),
        "patches/megatron_lm.py",
        "Keeps SNIP's state in Megatron's checkpoints.",
        f"{LM}/pull/5610 (no state of callbacks in checkpoints)",
        _LM_LOOP,
    ),
    # ---- Megatron-Bridge's loop ------------------------------------------------------------------
    Change(
        (
            "megatron.bridge.training.pretrain:runtime_config_update",
            "megatron.bridge.training.pretrain:normalize_callbacks",
            "megatron.bridge.training.pretrain:setup",
            "megatron.bridge.training.pretrain:_finish_train",
            "megatron.bridge.training.setup:setup_logging",
            "megatron.bridge.training.train:train_step",
            "megatron.bridge.training.train:checkpoint_and_decide_exit",
            "megatron.bridge.training.eval:evaluate",
            "megatron.bridge.training.eval:get_forward_backward_func",
            "megatron.bridge.training.checkpointing:generate_state_dict",
            "megatron.bridge.training.checkpointing:_load_base_checkpoint",
        ),
        "patches/megatron_bridge/loop.py",
        "The same points of Megatron-Bridge's loop, which has its own copies of these functions.",
        f"{BRIDGE}/issues/2064 (its callbacks can neither run a step again nor keep a state)",
        _BRIDGE_LOOP,
    ),
    # ---- Megatron-Core ---------------------------------------------------------------------------
    Change(
        (
            "megatron.core.tensor_parallel.layers:ColumnParallelLinear._forward_impl",
            "megatron.core.tensor_parallel.layers:RowParallelLinear._forward_impl",
        ),
        "megatron_snip/linears/megatron_linear.py",
        "Simulates the GEMMs of Megatron's own linears; the class chooses `_forward_impl` and has "
        "no argument for it.",
        f"{LM}/blob/core_v0.19.2/megatron/core/tensor_parallel/layers.py",
        "when these classes take their GEMMs as an argument",
    ),
    Change(
        ("megatron.core.rerun_state_machine:RerunStateMachine.validate_result",),
        "megatron_snip/run/step.py",
        "Lets the guard see a NaN loss before Megatron ends the job: the iteration may run again "
        "under the plan before.",
        f"{LM}/issues/3884",
        "when the machine can be asked to leave a result to its caller",
    ),
    Change(
        ("megatron.core.full_cuda_graph:FullCudaGraphWrapper.__call__",),
        "patches/graphs.py",
        "Runs a measured iteration without the graph, and captures again after a new plan.",
        _NO_HOOK,
        "when Megatron-Core can skip a graph for one iteration",
        releases="0.16 and later",
    ),
    Change(
        (
            "megatron.core.transformer.cuda_graphs:TECudaGraphHelper.__init__",
            "megatron.core.transformer.cuda_graphs:TECudaGraphHelper.create_cudagraphs",
            "megatron.core.transformer.cuda_graphs:TECudaGraphHelper.delete_cuda_graphs",
        ),
        "patches/graphs.py",
        "Captures layers again after a plan that changes them; a helper captures once.",
        _NO_HOOK,
        "when a helper can capture a second time",
        releases="0.17 and later",
    ),
    Change(
        ("torch.nn:Module.__call__",),
        "patches/graphs.py",
        "Removes a wrapper that make_graphed_callables leaves on classes which inherit `__call__`, "
        "so that layers without a graph quantize their weights anew.",
        f"{TE}/blob/v2.20/transformer_engine/pytorch/graph.py (seen in 2.8 to 2.20)",
        "until the oldest supported Transformer Engine restores an inherited `__call__`",
        releases="Transformer Engine 2.8 to 2.20",
    ),
    Change(
        (
            "transformer_engine.pytorch:initialize_ub",
            "transformer_engine.pytorch.module.base:initialize_ub",
        ),
        "patches/overlap_buffers.py",
        "Makes communication buffers for both precisions that a plan may give a linear; Megatron "
        "asks for those of the job alone.",
        f"{TE}/pull/2043",
        "when Megatron asks for buffers by the precision of each linear",
        releases="Transformer Engine 2.7 and later",
    ),
    Change(
        (
            "megatron.core.transformer.moe.paged_stash:PagedStashRunner.__call__",
            "megatron.core.transformer.moe.paged_stash:PagedStashRunner.prepare_for_rerun",
        ),
        "patches/expert_capacity.py",
        "Measures experts without static buffers, whose spare rows are no tokens, and forgets what "
        "a pass measured that Megatron repeats. Sets `moe_expert_rank_capacity_factor` of the "
        "token dispatchers meanwhile.",
        _NO_HOOK,
        "when the runner can be asked for one pass without the limit",
        releases="0.19 and later",
    ),
    Change(
        (
            "megatron.core.models.common.utils:should_free_input",
            "megatron.core.models.gpt.fine_grained_callables:should_free_input",
        ),
        "patches/expert_overlap.py",
        "Keeps the experts' input while a plan runs experts in BF16; Megatron frees it in every "
        "FP8 or FP4 job.",
        f"{LM}/blob/core_v0.19.2/megatron/core/models/common/utils.py",
        "when Megatron decides by the recipe of the experts",
        releases="0.16 and later (in the second module before 0.19)",
    ),
    Change(
        ("megatron.core.transformer.module:MegatronModule.set_is_first_microbatch",),
        "megatron_snip/linears/te/fresh_weights.py",
        "Quantizes weights again in every step of a BF16 job that SNIP plans.",
        f"{LM}/issues/5641 (fixed for --te-precision-config-file in 0.19 by pull request 5642; a "
        "plan is not such a file)",
        "when Megatron asks each module whether it quantizes (pull request 7353)",
        on_instances=True,
    ),
    Change(
        (
            "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup._post_param_sync",
        ),
        "megatron_snip/linears/te/gathered_weights.py",
        "Saves the BF16 weight that Megatron gathers before it is quantized to MXFP8.",
        f"{LM}/blob/core_v0.19.2/megatron/core/distributed/param_and_grad_buffer.py",
        "when a stored weight can be had in BF16 upstream",
        releases="0.18 and later",
        on_instances=True,
    ),
    # ---- modules of Transformer Engine -----------------------------------------------------------
    Change(
        (
            "megatron.core.extensions.transformer_engine:TELinear.te_quant_params",
            "transformer_engine.pytorch.module.base:TransformerEngineBaseModule.fp8_initialized",
            "transformer_engine.pytorch.module.base:TransformerEngineBaseModule"
            ".fp8_meta_tensors_initialized",
            "transformer_engine.pytorch.module.base:TransformerEngineBaseModule._fp8_workspaces",
            "transformer_engine.pytorch.module.base:TransformerEngineBaseModule.fp8_meta",
            "transformer_engine.pytorch.module.base:TransformerEngineBaseModule"
            ".disable_parameter_transpose_cache",
        ),
        "megatron_snip/linears/te/linear.py",
        "Gives a module the recipe of its plan, and makes it build quantizers and quantized "
        "weights again: Transformer Engine compares the class of a recipe and not its fields.",
        f"{TE}/issues/3157",
        "when a recipe may change during training (pull request 2817 and issue 3157)",
        on_instances=True,
    ),
    Change(
        ("transformer_engine.pytorch.module.base:TransformerEngineBaseModule._fp8_workspaces",),
        "megatron_snip/linears/te/linear.py",
        "Drops NVFP4 weights that lack what dgrad multiplies, where Megatron recomputes "
        "activations.",
        f"{TE}/pull/2524",
        "until Transformer Engine 2.12 is the oldest supported",
        releases="Transformer Engine 2.8 to 2.11",
        on_instances=True,
    ),
    Change(
        (
            "transformer_engine.pytorch.module.base:TransformerEngineBaseModule.fp8_meta",
            "transformer_engine.pytorch.module.base:TransformerEngineBaseModule.quantizers",
        ),
        "megatron_snip/linears/te/history.py",
        "Keeps the first state of delayed scaling while a plan runs another recipe: the global "
        "update reaches no later one.",
        f"{TE}/pull/2620 (QuantizerRole keeps the state of one recipe class)",
        "when a state outlives a change of recipe upstream",
        on_instances=True,
    ),
    Change(
        (
            "transformer_engine.pytorch.module.base:TransformerEngineBaseModule"
            "._get_weight_tensors",
            "transformer_engine.pytorch.module.base:TransformerEngineBaseModule"
            ".primary_weights_in_fp8",
        ),
        "megatron_snip/linears/te/stored_weight.py",
        "Multiplies a BF16 copy of a weight that is stored quantized, under an option that is not "
        "the job's.",
        f"{TE}/pull/2691 (a stored weight has the format of its recipe)",
        "when a module can multiply a weight in another format than it is stored in",
        on_instances=True,
    ),
    Change(
        (
            "transformer_engine.pytorch.module.linear:Linear.ub_overlap_ag_fprop",
            "transformer_engine.pytorch.module.linear:Linear.ub_overlap_ag_dgrad",
            "transformer_engine.pytorch.module.linear:Linear.ub_overlap_rs_fprop",
            "transformer_engine.pytorch.module.linear:Linear.ub_overlap_rs_dgrad",
            "transformer_engine.pytorch.module.linear:Linear.ub_bulk_dgrad",
            "transformer_engine.pytorch.module.linear:Linear.ub_bulk_wgrad",
        ),
        "megatron_snip/linears/te/overlap.py",
        "Communicates without overlap in a recipe that has no communication buffer; Transformer "
        "Engine raises an error there.",
        f"{TE}/pull/2043",
        "when a module without a buffer falls back by itself",
        releases="Transformer Engine 2.7 and later",
        on_instances=True,
    ),
    Change(
        (
            "megatron.core.extensions.transformer_engine:TEFusedMLP.forward",
            "megatron.core.transformer.moe.experts:TEGroupedMLP._with_fused_impl",
            "megatron.core.transformer.moe.experts:TEGroupedMLP._use_grouped_tensor",
            "transformer_engine.pytorch.module.grouped_linear:GroupedLinear.use_grouped_tensor",
        ),
        "megatron_snip/linears/te/fused_mlp.py",
        "Runs the two linears of an MLP with fused operations, or the fused operations in the "
        "plan's recipe; they are built once and do not call their linears.",
        f"{LM}/blob/core_v0.19.2/megatron/core/extensions/transformer_engine.py",
        "when fused operations take a recipe for each call",
        releases="0.16 and later; experts from 0.18 on, grouped tensors after 0.19",
        on_instances=True,
    ),
    Change(
        ("logging:LogRecord",),
        "patches/megatron_bridge/settings.py",
        "Puts Bridge's names of settings into this package's lines of the log.",
        "https://docs.python.org/3/library/logging.html#logging.setLogRecordFactory",
        "when each message names settings for the training loop that runs",
        releases="under Megatron-Bridge",
    ),
    Change(
        ("megatron.core.transformer.attention:Attention.core_attention.current_max_attn_logits",),
        "megatron_snip/linears/snapshot.py",
        "Puts a statistic of attention back when an iteration runs again.",
        f"{LM}/blob/core_v0.19.2/megatron/core/transformer/attention.py",
        "when Megatron's own rerun restores it",
        releases="0.16 and later",
        on_instances=True,
    ),
    # ---- the process -----------------------------------------------------------------------------
    Change(
        ("sys:meta_path",),
        "patches/imports.py",
        "Patches a loop when the script has imported it, so that the script decides which "
        "Megatron that is.",
        "importlib has no event for an import",
        "with the last patch of a loop",
    ),
    Change(
        ("sys:meta_path",),
        "megatron_snip/__init__.py",
        "Finds the folders kernels/ and patches/ of a checkout that is not installed.",
        "the layout of this repository",
        "when a checkout is always installed",
        releases="checkouts only",
    ),
    Change(
        ("os:execv", "os:execve"),
        "patches/new_program.py",
        "A script that starts itself again (recipe runners of Megatron-Bridge) starts with SNIP.",
        f"{BRIDGE}/blob/main/scripts/performance (its runners replace their process)",
        "when no supported runner replaces its process",
    ),
    # ---- machines without a GPU ------------------------------------------------------------------
    Change(
        ("megatron.legacy.fused_kernels:load",),
        "patches/cpu/megatron.py",
        "Does not build CUDA kernels under --cpu; other functions of Megatron's that need a CUDA "
        "package have twins there.",
        _NO_HOOK,
        "never: it is how --cpu works",
        releases="all, with --cpu",
    ),
    Change(
        ("torch:cuda", "torch.distributed:all_to_all_single"),
        "patches/cpu/__init__.py",
        "Answers calls of torch.cuda, and what gloo lacks of NCCL, from the CPU under --cpu.",
        _NO_HOOK,
        "never: it is how --cpu works",
        releases="all, with --cpu",
    ),
    Change(
        (
            "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.state_dict",
            "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.load_state_dict",
            "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
            "._set_main_param_and_optimizer_states",
        ),
        "patches/cpu/torch_adam.py",
        "Saves and loads the steps of PyTorch's AdamW, which Megatron takes where neither "
        "Transformer Engine nor Apex is installed.",
        f"{LM}/blob/core_v0.19.2/megatron/core/optimizer/distrib_optimizer.py",
        "when the distributed optimizer supports PyTorch's AdamW",
        releases="all, with --cpu",
    ),
    # ---- jobs that are not run -------------------------------------------------------------------
    Change(
        (
            "torch.distributed:init_process_group",
            "megatron.core.parallel_state:initialize_model_parallel",
            "megatron.core.parallel_state:create_group",
            "megatron.core.parallel_state:generate_masked_orthogonal_rank_groups",
            "megatron.core.parallel_state:get_nccl_options",
            "torch.nn:Module.cuda",
            "torch.nn:Module.to_empty",
            "megatron.core.tensor_parallel.layers:_grad_accum_fusion_available",
            "megatron.core.transformer.dot_product_attention:DotProductAttention.__init__",
        ),
        "patches/preflight/world.py",
        "Builds the model of any rank of a job for megatron-snip preflight, without other ranks "
        "and without memory.",
        "--fake-process-group of Megatron 0.19 makes the groups; nothing upstream stops there",
        "never: it is how preflight works",
        releases="all, in megatron-snip preflight",
    ),
)
"""Every change, in the order of the page docs/megatron.md."""

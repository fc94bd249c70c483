"""A script of Megatron-LM up to its model: its own parser, its own checks, its own provider.

What the script would write, start or wait for before it builds its model is left out.
"""

import copy
import math
import os
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from megatron_snip.errors import one_line
from megatron_snip.linears.te.modules import have_te
from megatron_snip.patches.arguments import add_snip_arguments
from megatron_snip.patches.cpu.megatron import CPU_DEFAULTS
from megatron_snip.patches.preflight.job import MADE_UP_VOCABULARY, BuiltJob, Reached, least_ranks
from megatron_snip.patches.preflight.refusal import refusing
from megatron_snip.patches.preflight.world import World
from megatron_snip.patches.registry import Call, Handler, Patch, Session

_LEFT_OUT: dict[str, Any] = {
    # what it would write
    "tensorboard_dir": None,
    "wandb_project": "",
    "enable_one_logger": False,
    "log_progress": False,
    "result_rejected_tracker_filename": None,
    "non_persistent_ckpt_type": None,
    "record_memory_history": False,
    # what it would start
    "async_save": False,
    "inprocess_restart": False,
    "enable_ft_package": False,
    "adlr_autoresume": False,
    "exit_signal_handler": False,
}
"""Settings with which Megatron builds the same model, and does nothing else."""

OF_THE_LINEARS = {"distributed_backend", "transformer_impl", "gradient_accumulation_fusion"}

_BUILT_WITH: dict[str, Any] = {
    **{name: value for name, value in CPU_DEFAULTS.items() if name not in OF_THE_LINEARS},
    "rank": 0,
    "init_model_with_meta_device": True,
    "use_cpu_initialization": False,
}
"""Kernels that are fused, and need a package of the GPU's, are not of the linears."""

_WITHOUT_TE: dict[str, Any] = {
    "transformer_impl": "local",
    "gradient_accumulation_fusion": False,
    "use_transformer_engine_op_fuser": False,
    "tp_comm_overlap": False,
    "cuda_graph_impl": "none",
    **dict.fromkeys(("fp8", "fp4"), None),
    **dict.fromkeys(("fp8_param_gather", "fp4_param_gather"), False),
    "reuse_grad_buf_for_mxfp8_param_ag": False,
}
"""Settings with which Megatron's own layers are built in place of Transformer Engine's."""


def patches(job: BuiltJob) -> list[Patch]:
    """Return the patches on Megatron-LM's loop that stop a script when its model is built.

    Args:
        job: receives the settings and the model.
    """

    def add_flags(call: Call, session: Session) -> Any:
        parser = call.run()
        add_snip_arguments(parser)  # Megatron's own argument files may have them
        return parser

    def validate(call: Call, session: Session) -> Any:
        args = call.arguments["args"]
        ranks = least_ranks(args) if job.gpus is None else job.gpus
        job.world = World(ranks)
        args.world_size = ranks
        os.environ["WORLD_SIZE"] = str(ranks)
        _set_connections(args)
        with refusing("Megatron refuses the arguments"):
            result = call.run()
        job.args = copy.copy(args)
        job.lacks_te = args.transformer_impl == "transformer_engine" and not have_te()
        built_with = {**_LEFT_OUT, **_BUILT_WITH, **(_WITHOUT_TE if job.lacks_te else {})}
        for name, value in built_with.items():
            if hasattr(args, name):
                setattr(args, name, value)
        return result

    def build_tokenizer(call: Call, session: Session) -> Any:
        try:
            return call.run()
        except Exception as error:
            args = call.arguments["args"]
            size = getattr(args, "vocab_size", None) or MADE_UP_VOCABULARY
            multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
            padded = multiple * math.ceil(size / multiple)  # as Megatron pads it
            args.padded_vocab_size = getattr(args, "padded_vocab_size", None) or padded
            job.notes.append(
                f"the tokenizer cannot be read here ({one_line(error)}): a vocabulary of "
                f"{args.padded_vocab_size} is assumed, which counts for memory alone"
            )

    def start(call: Call, session: Session) -> Any:
        assert job.world is not None
        with job.world.installed():
            call.run()

    def build(call: Call, session: Session) -> Any:
        assert job.world is not None
        with job.world.installed():
            job.build(lambda: _chunks(call.arguments))
        raise Reached

    def leave_out(call: Call, session: Session) -> None:
        """What only a running job needs."""

    package = "megatron.training"
    of: list[tuple[str, str, Handler]] = [
        ("arguments", "add_megatron_arguments", add_flags),
        ("arguments", "validate_args", validate),
        ("initialize", "validate_args", validate),  # before 0.18
        ("global_vars", "_build_tokenizer", build_tokenizer),
        ("initialize", "_compile_dependencies", leave_out),
        ("initialize", "_initialize_tp_communicators", leave_out),
        ("initialize", "_initialize_distributed", start),
        ("training", "set_jit_fusion_options", leave_out),
        ("training", "setup_model_and_optimizer", build),
    ]
    return [
        Patch(f"{package}.{module}", name, (), when="always", optional=True, handler=handler)
        for module, name, handler in of
    ]


def _set_connections(args: Namespace) -> None:
    """Set what Megatron checks of the environment of a job's ranks, unless it is set here."""
    has_fsdp = getattr(args, "use_torch_fsdp2", False) or getattr(args, "use_megatron_fsdp", False)
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "8" if has_fsdp else "1")


def _chunks(arguments: dict[str, Any]) -> list[Any]:
    """Build the model chunks of this rank as `setup_model_and_optimizer` does, without DDP."""
    from megatron.training import training

    cfg: Any = arguments.get("cfg_container")
    if getattr(cfg, "model", None) is None:
        provider: Callable[..., Any] = arguments["model_provider_func"]
        model = training.get_model(provider, arguments["model_type"], wrap_with_ddp=False)
    else:
        from megatron.core.process_groups_config import ProcessGroupCollection

        builder = cfg.model.get_builder_cls()(cfg.model)
        model = builder.build_distributed_models(
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
            ddp_config=cfg.ddp,
            overlap_param_gather_with_optimizer_step=False,
            use_megatron_fsdp=cfg.dist.use_megatron_fsdp,
            use_torch_fsdp2=cfg.dist.use_torch_fsdp2,
            wrap_with_ddp=False,
        )
    return list(model) if isinstance(model, list) else [model]

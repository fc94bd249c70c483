"""A script or a recipe of Megatron-Bridge up to its model: its own settings and its own builder.

What Bridge would write, start or wait for before it builds the model is left out.
"""

import contextlib
import importlib
import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from megatron_snip.errors import UsageError, did_you_mean, one_line
from megatron_snip.patches.megatron_bridge.callback import callbacks_in
from megatron_snip.patches.megatron_bridge.loop import PRETRAIN, SETUP
from megatron_snip.patches.megatron_bridge.settings import settings_of
from megatron_snip.patches.preflight.job import (
    BRIDGE_LOOP,
    MADE_UP_VOCABULARY,
    BuiltJob,
    Reached,
    least_ranks,
)
from megatron_snip.patches.preflight.refusal import refusing
from megatron_snip.patches.preflight.world import World
from megatron_snip.patches.registry import Call, Handler, Patch, Session

_LEFT_OUT: dict[str, dict[str, Any]] = {
    "checkpoint": {"save": None, "load": None, "async_save": False},
    "logger": {"tensorboard_dir": None, "wandb_project": None, "log_progress": False},
    "dist": {"use_decentralized_pg": False},
    "model": {"init_model_with_meta_device": True, "use_cpu_initialization": False},
}
"""Settings with which Bridge builds the same model, and does nothing else; by section."""

_RECIPES = ("megatron.bridge.perf_recipes", "megatron.bridge.recipes")
_SUFFIX = "_config"


no_callback = Patch(
    "megatron_snip.patches.install",
    "install_for_callback",
    (),
    when="always",
    handler=lambda call, session: session,
)
"""A SnipCallback installs the patches of a job that runs; here it only holds settings."""


def patches(job: BuiltJob) -> list[Patch]:
    """Return the patches on Bridge's loop that stop a job when its model is built.

    Args:
        job: receives the settings and the model.
    """
    vocabulary = MADE_UP_VOCABULARY

    def settle(call: Call, session: Session) -> Any:
        nonlocal vocabulary
        cfg = call.arguments["cfg"]
        vocabulary = cfg.model.vocab_size or vocabulary
        ranks = least_ranks(cfg.model) if job.gpus is None else job.gpus
        job.world = World(ranks)
        os.environ["WORLD_SIZE"] = str(ranks)
        with refusing("Megatron-Bridge refuses the job"):
            result = call.run()
        job.args = settings_of(cfg)
        job.loop = BRIDGE_LOOP
        for section, values in _LEFT_OUT.items():
            for name, value in values.items():
                if hasattr(getattr(cfg, section), name):
                    setattr(getattr(cfg, section), name, value)
        cfg.inprocess_restart = None
        return result

    def callbacks(call: Call, session: Session) -> Any:
        found = callbacks_in(call.arguments.get("callbacks"))
        if found:
            job.given = found[0].config
        return call.run()

    def start(call: Call, session: Session) -> Any:
        assert job.world is not None
        with job.world.installed():
            return call.run()

    def build_tokenizer(call: Call, session: Session) -> Any:
        try:
            return call.run()
        except Exception as error:
            job.notes.append(
                f"the tokenizer cannot be read here ({one_line(error)}): a vocabulary of "
                f"{vocabulary} is assumed, which counts for memory alone"
            )
            return SimpleNamespace(vocab_size=vocabulary)

    def build(call: Call, session: Session) -> Any:
        assert job.world is not None
        cfg = call.arguments["cfg"]
        with job.world.installed():
            job.build(lambda: _chunks(cfg))
        raise Reached

    def leave_out(call: Call, session: Session) -> None:
        """What only a running job needs."""

    of: list[tuple[str, str, Handler]] = [
        (PRETRAIN, "runtime_config_update", settle),
        (PRETRAIN, "normalize_callbacks", callbacks),
        # It destroys the process groups, which discovery asks for the ranks of experts.
        (PRETRAIN, "_cleanup_after_pretrain_failure", leave_out),
        (SETUP, "maybe_log_and_save_config", leave_out),
        (SETUP, "initialize_megatron", start),
        (SETUP, "set_jit_fusion_options", leave_out),
        (SETUP, "create_checkpoint_manager", leave_out),
        (SETUP, "build_tokenizer", build_tokenizer),
        (SETUP, "initialize_tensor_inspect_pre_model_initialization", leave_out),
        (SETUP, "start_memory_history_recording", leave_out),
        (SETUP, "_build_distributed_model", build),
        ("megatron.bridge.training.initialize", "compile_helpers", leave_out),
    ]
    return [
        Patch(module, name, (), when="always", optional=True, handler=handler)
        for module, name, handler in of
    ]


def run_recipe(name: str, overrides: Sequence[str]) -> None:
    """Start the training of a recipe, as Bridge's own scripts do.

    Args:
        name: of the recipe, such as `llama3_8b_pretrain_config`; its last word may be left out.
        overrides: `SECTION.NAME=VALUE`.

    Raises:
        UsageError: if there is no such recipe.
    """
    recipe = find_recipe(name)
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    cfg = recipe()
    if overrides:
        cfg = process_config_with_overrides(cfg, cli_overrides=list(overrides))
    pretrain(cfg, forward_step)


def find_recipe(name: str) -> Any:
    """Return the function of a recipe of Megatron-Bridge.

    Raises:
        UsageError: if Bridge has no such recipe.
    """
    known: dict[str, Any] = {}
    for module in _RECIPES:
        with contextlib.suppress(ModuleNotFoundError):  # before 0.6 there were no perf_recipes
            known |= vars(importlib.import_module(module))
    for found in (known.get(name), known.get(f"{name}{_SUFFIX}")):
        if callable(found):
            return found
    recipes = [each for each in known if each.endswith(_SUFFIX)]
    raise UsageError(
        f"'{name}' is neither a script nor a recipe of Megatron-Bridge{did_you_mean(name, recipes)}"
    )


def _chunks(cfg: Any) -> list[Any]:
    """Build the model chunks of this rank as `_build_distributed_model` does, without DDP."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    settings: dict[str, Any] = {
        "ddp_config": cfg.ddp,
        "use_megatron_fsdp": cfg.dist.use_megatron_fsdp,
        "use_torch_fsdp2": cfg.dist.use_torch_fsdp2,
        "wrap_with_ddp": False,
        "pg_collection": ProcessGroupCollection.use_mpu_process_groups(),
    }
    if hasattr(cfg.model, "provide_distributed_model"):
        return list(cfg.model.provide_distributed_model(**settings))
    builder = cfg.model.get_builder_cls()(cfg.model)
    return list(
        builder.build_distributed_models(overlap_param_gather_with_optimizer_step=False, **settings)
    )

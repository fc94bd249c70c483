"""From Megatron's settings and model to a controller.

Settings are checked right after Megatron's own, on every rank, before any process group exists. A
controller is attached when Megatron has built the model and loaded a checkpoint.
"""

from __future__ import annotations

import argparse
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_snip.config import SnipConfig
from megatron_snip.errors import naming_field
from megatron_snip.patches.arguments import exit_on_error, snip_config
from megatron_snip.patches.incompatible import check_modules
from megatron_snip.patches.registry import Call, Session, patch

if TYPE_CHECKING:  # without --snip a run imports neither planning nor reporting
    from megatron_snip.reporting.events import Writer
    from megatron_snip.topology import Topology

logger = logging.getLogger(__name__)

_YAML_TYPES = (bool, int, float, str, type(None))
"""Exact types of Megatron's arguments that YAML can hold; enums are left out."""


@patch("megatron.training.arguments", "validate_args", needs=("args",))
def validation(call: Call, session: Session) -> Any:
    """Check SNIP's settings after Megatron has validated its own."""
    result = call.run()
    config = exit_on_error(lambda: snip_config(call.arguments["args"], session.cli_flags))
    session.makes_plans = config.enabled and not config.collect_only
    return result


validation_before_0_18 = replace(validation, module="megatron.training.initialize", optional=True)


@patch("megatron.training.training", "setup_model_and_optimizer", needs=("model_type",), returns=2)
def model_setup(call: Call, session: Session) -> Any:
    """Attach a controller to what Megatron has built and loaded."""
    from megatron.training.global_vars import get_args

    session.end()  # the training run before this one in the process (in-process restart)
    args = get_args()
    # A --yaml-cfg namespace is not validated before.
    config = exit_on_error(lambda: snip_config(args, session.cli_flags))
    result = call.run()
    if config.enabled:
        model, optimizer = result[0], result[1]
        exit_on_error(lambda: attach(session, config, args, model, optimizer))
    return result


def attach(
    session: Session, config: SnipConfig, args: argparse.Namespace, model: Any, optimizer: Any
) -> None:
    """All ranks: attach a controller to the model that Megatron has built (and loaded).

    Raises:
        SnipError: on every rank, if the settings or the checkpoint's state do not fit the model.
    """
    from megatron_snip.linears.availability import resolve_formats
    from megatron_snip.linears.discovery import current_topology
    from megatron_snip.patches.graphs import Graphs
    from megatron_snip.planning.plan import shares_text
    from megatron_snip.run.controller import SnipController
    from megatron_snip.run.state import resumed_state

    check_modules(model)
    topology = current_topology()
    config = resolve_formats(config, model, topology.control)
    num_done = int(getattr(args, "iteration", 0) or 0)
    state, warning = resumed_state(session.loaded_state, num_done)
    if warning is not None and topology.rank == 0:
        logger.warning("snip: %s", warning)
    varying = getattr(args, "variable_seq_lengths", False)
    session.controller = SnipController(
        config,
        model,
        optimizer,
        seed=int(args.seed),
        writers=make_writers(config, args, topology),
        state=state,
        topology=topology,
        microbatch_tokens=None if varying else int(args.micro_batch_size) * int(args.seq_length),
        calibration_cache=_directory(config, args) / "calibration.json",
        train_iters=getattr(args, "train_iters", None),
    )
    session.graphs = Graphs(session.controller.model)
    if topology.rank == 0:
        plan = session.controller.plan
        verb = "starts with" if state is None else f"resumes after iteration {state.iteration} with"
        logger.info(
            "snip: plans %d linears; training %s %s: %s",
            len(plan.linears),
            verb,
            plan.label,
            shares_text(session.controller.format_shares),
        )


def make_writers(config: SnipConfig, args: argparse.Namespace, topology: Topology) -> list[Writer]:
    """All ranks: return this rank's writers: files on rank 0, TensorBoard and W&B on the last rank.

    TensorBoard and W&B are Megatron's own, which log at Megatron's interval.

    Raises:
        UsageError: on every rank, if another job writes to the directory, or it holds files of
            others with SNIP's names.
        RemoteFailure: on every rank, if the directory cannot be written.
    """
    from megatron_snip.collectives import on_rank_0
    from megatron_snip.reporting.run_directory import open_run
    from megatron_snip.reporting.writers import (
        MEGATRON_LOGS,
        TensorBoardWriter,
        WandbWriter,
        added_writers,
    )

    writers: list[Writer] = []
    dump = config.model_dump(mode="json")

    def open_files() -> None:
        megatron = {k: v for k, v in sorted(vars(args).items()) if type(v) in _YAML_TYPES}
        path, resumes = _directory(config, args), getattr(args, "iteration", 0)
        settings = {"snip": dump, "megatron": megatron}
        writers.append(open_run(path, settings, "continue" if resumes else "archive"))
        logger.info("snip: plans, problems and metrics go to %s", path)

    with naming_field("output_dir"):
        on_rank_0("opening --snip-output-dir", open_files, topology.control)
    if topology.rank == 0:
        writers += added_writers(dump)
    if topology.rank != topology.world_size - 1:
        return writers
    from megatron.training import global_vars

    interval = int(getattr(args, "tensorboard_log_interval", 1) or 1)
    board, wandb = global_vars.get_tensorboard_writer(), global_vars.get_wandb_writer()
    if board is not None:
        writers.append(TensorBoardWriter(board, dump, interval, MEGATRON_LOGS))
    if wandb is not None:
        writers.append(WandbWriter(wandb, dump, interval, MEGATRON_LOGS))
    return writers


def _directory(config: SnipConfig, args: argparse.Namespace) -> Path:
    return config.output_dir or Path(getattr(args, "save", None) or "") / "snip"

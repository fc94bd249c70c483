"""From a job's settings and model to a controller, whichever training loop runs the job.

All ranks attach together, when the loop has built the model and loaded a checkpoint.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_snip.config import SnipConfig
from megatron_snip.errors import UsageError, naming_field
from megatron_snip.patches.agreement import (
    files_of_rank,
    machine_of_rank,
    refuse_differences,
    refuse_ranks_without_snip,
    settings_of_rank,
)
from megatron_snip.patches.arguments import with_flags_of_the_job
from megatron_snip.patches.incompatible import check_modules, running_settings
from megatron_snip.patches.registry import Package, Session

if TYPE_CHECKING:  # without --snip a run imports neither planning nor reporting
    from megatron_snip.linears.runtime import MicrobatchTokens
    from megatron_snip.reporting.events import Writer
    from megatron_snip.run.state import RunState
    from megatron_snip.topology import Topology

logger = logging.getLogger(__name__)

_YAML_TYPES = (bool, int, float, str, type(None))
"""Exact types of Megatron's settings that YAML can hold; enums are left out."""


Loggers = Callable[[], dict[str, Any]]
"""Returns the loggers of the last rank by name: TensorBoard (a `SummaryWriter`), W&B and MLflow
(modules), Comet (an experiment). Each may be None or absent."""


def attach(
    session: Session,
    config: SnipConfig,
    args: argparse.Namespace,
    model: Any,
    optimizer: Any,
    loggers: Loggers,
    packages: Sequence[Package],
) -> None:
    """All ranks: attach a controller to the model that Megatron has built (and loaded).

    Args:
        session: receives the controller.
        config: the settings.
        args: Megatron's settings, by the names that Megatron-LM's parser gives them.
        model: Megatron's model chunks.
        optimizer: Megatron's optimizer.
        loggers: returns the loggers of the training loop; called on the last rank.
        packages: packages that the loop is in, for the log.

    Raises:
        SnipError: on every rank, if the settings or the checkpoint's state do not fit the model.
    """
    from megatron.core.utils import get_model_config

    from megatron_snip.linears.discovery import current_topology
    from megatron_snip.linears.te.machine import this_machine
    from megatron_snip.linears.te.modules import have_te
    from megatron_snip.patches.graphs import Graphs
    from megatron_snip.patches.step import StepMetrics
    from megatron_snip.planning.plan import format_shares, shares_text
    from megatron_snip.reporting.background import in_background
    from megatron_snip.run.controller import SnipController
    from megatron_snip.run.state import resumed_state

    refuse_ranks_without_snip()
    topology = current_topology()
    num_done = int(getattr(args, "iteration", 0) or 0)
    state: RunState | None = None
    warning: str | None = None

    def checked() -> dict[str, str]:
        nonlocal config, state, warning
        check_modules(model)
        of_model = get_model_config(model[0])
        settings = running_settings(args, of_model)
        config = with_flags_of_the_job(config, settings)
        try:
            state, warning = resumed_state(session.loaded_state, num_done)
        except UsageError as error:  # each rank may have read a file of its own, which is damaged
            raise UsageError(f"rank {topology.rank}: {error}") from None
        loaded = None if state is None else state.to_dict()
        # Also on a pipeline stage without linears: its options are those of the others.
        machine = this_machine(config.backend != "simulate" and have_te(), of_model)
        return (
            settings_of_rank(config, args)
            | machine_of_rank(machine)
            | files_of_rank(of_model, topology.stage, loaded)
        )

    refuse_differences(topology.control.gather("checking the model", checked))
    session.makes_plans = not config.collect_only
    if warning is not None and topology.rank == 0:
        logger.warning("snip: %s", warning)
    writers, run_id = make_writers(config, args, topology, loggers, state)
    session.controller = SnipController(
        config,
        model,
        optimizer,
        seed=int(args.seed),
        writers=in_background(writers),
        state=state,
        run_id=run_id,
        topology=topology,
        tokens=tokens_of(args, get_model_config(model[0])),
        calibration_cache=run_directory_of(config, args) / "calibration.json",
        train_iters=getattr(args, "train_iters", None),
        num_done=num_done,
    )
    session.metrics = StepMetrics(topology)
    session.graphs = Graphs(session.controller.model)
    if topology.rank == 0:
        releases = ", ".join(package.release for package in packages)
        logger.info("snip: found the functions that it needs in %s", releases)
        plan = session.controller.plan
        shares = format_shares(plan.linears, session.controller.model.job.stage_and_flops)
        verb = "starts with" if state is None else f"resumes after iteration {state.iteration} with"
        logger.info(
            "snip: plans %d linears; training %s %s: %s",
            len(plan.linears),
            verb,
            plan.label,
            shares_text(shares),
        )


def tokens_of(args: argparse.Namespace, config: Any) -> MicrobatchTokens:
    """Return the tokens of a job's microbatches.

    Args:
        args: Megatron's settings, by the names that Megatron-LM's parser gives them.
        config: the model's TransformerConfig, whose values win.
    """
    from megatron_snip.linears.runtime import UNKNOWN_TOKENS, MicrobatchTokens

    # A script may set it in the config alone, and Bridge's data sets (`settings_of`) vary where the
    # config does not say so.
    if any(getattr(each, "variable_seq_lengths", False) for each in (args, config)):
        return UNKNOWN_TOKENS
    args = running_settings(args, config)
    length = int(args.seq_length)
    # Set for a T5, and by pretrain_vlm.py: there `seq_length` is the number of image tokens.
    decoder_length = int(getattr(args, "decoder_seq_length", None) or length)
    samples = int(args.micro_batch_size)
    # Megatron-LM's from 0.18 on, and Megatron-Bridge's.
    in_evaluation = int(getattr(args, "eval_micro_batch_size", None) or samples)
    if getattr(args, "full_validation", False):
        in_evaluation = 1  # one sample at a time is read
    evaluation = None
    if in_evaluation != samples:
        evaluation = MicrobatchTokens(in_evaluation * decoder_length, in_evaluation * length)
    return MicrobatchTokens(samples * decoder_length, samples * length, evaluation)


def make_writers(
    config: SnipConfig,
    args: argparse.Namespace,
    topology: Topology,
    loggers: Loggers,
    state: RunState | None = None,
) -> tuple[list[Writer], str]:
    """All ranks: return this rank's writers, and what identifies the run.

    Rank 0 writes files, the last rank to TensorBoard, W&B, MLflow and Comet. Those are the training
    loop's own, which log at its interval.

    Args:
        config: the settings.
        args: Megatron's settings.
        topology: this rank's place.
        loggers: returns the loggers of the training loop; called on the last rank.
        state: of the stopped run. Files of that run continue; those of another one are moved to a
            folder `previous-N`.

    Raises:
        UsageError: on every rank, if another job writes to the directory, or it holds files of
            others with SNIP's names.
        RemoteFailure: on every rank, if the directory cannot be written.
    """
    writers: list[Writer] = []
    dump = config.model_dump(mode="json")

    # What one rank uses is imported there: 16,384 ranks read modules from one file system.
    def open_files() -> str:
        from megatron_snip.directory import run_id
        from megatron_snip.reporting.opening import is_directory_of, open_run

        megatron = {k: v for k, v in sorted(vars(args).items()) if type(v) in _YAML_TYPES}
        settings = {"snip": dump, "megatron": megatron}
        path = run_directory_of(config, args)
        continues = state is not None and is_directory_of(path, state.run_id, state.history)
        files = open_run(path, settings, continues)
        writers.append(files)
        # Not later: measured times (`calibration.json`) of an earlier run would be read.
        files.begin()
        logger.info("snip: plans, problems and metrics go to %s", path)
        return run_id(path)

    with naming_field("output_dir"):
        identity: str = topology.control.on_rank_0("opening --snip-output-dir", open_files)
    if topology.rank == 0:
        from megatron_snip.reporting.writers import added_writers

        writers += added_writers(dump)
    if topology.rank != topology.world_size - 1:
        return writers, identity

    from megatron_snip.reporting.scalars import MEGATRON_LOGS
    from megatron_snip.reporting.trackers import CometWriter, MlflowWriter
    from megatron_snip.reporting.writers import TensorBoardWriter, WandbWriter, made_writers

    writer_of: dict[str, Callable[..., Writer]] = {
        "TensorBoard": TensorBoardWriter,
        "W&B": WandbWriter,
        "MLflow": MlflowWriter,
        "Comet": CometWriter,
    }
    interval = int(getattr(args, "tensorboard_log_interval", 1) or 1)
    makers = {
        name: partial(writer_of[name], each, dump, interval, MEGATRON_LOGS)
        for name, each in loggers().items()
        if each is not None
    }
    return [*writers, *made_writers(makers)], identity


def run_directory_of(config: SnipConfig, args: argparse.Namespace) -> Path:
    """Return the run directory: `snip` below Megatron's checkpoints, unless a flag names another.

    Raises:
        UsageError: if the checkpoints are in an object store, and no flag names a directory.
    """
    checkpoints = str(getattr(args, "save", None) or "")
    if config.output_dir is None and "://" in checkpoints:
        raise UsageError(
            f"is needed: checkpoints go to the object store {checkpoints}, and SNIP writes files",
            "output_dir",
        )
    return config.output_dir or Path(checkpoints) / "snip"

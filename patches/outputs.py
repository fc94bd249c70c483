"""Where a Megatron job's SNIP results go: our own files on rank 0, Megatron's writers on the last.

The directory is `--snip-output-dir`, else `snip/` below `--save`, else `snip/` below the current
directory; it is laid out like a run directory.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

from megatron_snip.collectives import attempt
from megatron_snip.config import SnipConfig
from megatron_snip.directory import archive_run, check_new_run, lock_directory, mark
from megatron_snip.reporting.events import Writer
from megatron_snip.reporting.run_directory import RunDirectory
from megatron_snip.reporting.writers import MEGATRON_LOGS, TensorBoardWriter, WandbWriter
from megatron_snip.topology import Topology

logger = logging.getLogger(__name__)

_PLAIN = (bool, int, float, str, type(None))
"""Exact types of Megatron's arguments that YAML has a word for; enums are left out."""


def output_directory(config: SnipConfig, save: str | None) -> Path:
    """Return the directory of SNIP's own files.

    Args:
        config: the settings.
        save: Megatron's `--save`, or None.
    """
    if config.output_dir is not None:
        return config.output_dir
    return (Path() if save is None else Path(save)) / "snip"


def make_writers(config: SnipConfig, args: argparse.Namespace, topology: Topology) -> list[Writer]:
    """All ranks: return this rank's writers: files on rank 0, Megatron's own on the last rank.

    Raises:
        RemoteFailure: on every rank, if the directory cannot be written.
    """

    def files() -> list[Writer]:
        return [_run_directory(config, args)] if topology.rank == 0 else []

    writers = attempt("opening --snip-output-dir", files, topology.control)
    if topology.rank == topology.world_size - 1:
        writers += _megatron_writers(config, args)
    return writers


def _run_directory(config: SnipConfig, args: argparse.Namespace) -> RunDirectory:
    path = output_directory(config, getattr(args, "save", None))
    directory = RunDirectory(path, lock_directory(path))
    check_new_run(path, overwrite=True)  # files without our marker are not touched
    mark(path)
    if not getattr(args, "iteration", 0):
        archive = archive_run(path)
        if archive is not None:
            logger.info("SNIP: files of the run before were moved to '%s'", archive)
    megatron = {k: v for k, v in sorted(vars(args).items()) if type(v) in _PLAIN}
    directory.start({"snip": config.model_dump(mode="json"), "megatron": megatron})
    logger.info("SNIP's plans, problems and metrics go to %s", directory.path)
    return directory


def _megatron_writers(config: SnipConfig, args: argparse.Namespace) -> list[Writer]:
    """Writers that log through those that Megatron has made, at Megatron's interval."""
    from megatron.training import global_vars

    tensorboard: Any = global_vars.get_tensorboard_writer()
    wandb: Any = global_vars.get_wandb_writer()
    settings = config.model_dump(mode="json")
    interval = int(getattr(args, "tensorboard_log_interval", 1) or 1)
    writers: list[Writer] = []
    if tensorboard is not None:
        writers.append(TensorBoardWriter(tensorboard, settings, interval, MEGATRON_LOGS))
    if wandb is not None:
        writers.append(WandbWriter(wandb, settings, interval, MEGATRON_LOGS))
    return writers

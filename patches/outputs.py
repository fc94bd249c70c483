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
from megatron_snip.reporting.megatron_writers import MegatronWriters
from megatron_snip.reporting.reporter import FileReporter, Reporter, Reporters
from megatron_snip.reporting.run_directory import RunDirectory
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


def make_reporter(
    config: SnipConfig, args: argparse.Namespace, topology: Topology
) -> Reporter | None:
    """All ranks: return this rank's reporter; None on ranks that report nothing.

    Raises:
        RemoteFailure: on every rank, if the directory cannot be written.
    """
    reporters: list[Reporter] = []
    if (
        files := attempt(
            "opening --snip-output-dir", lambda: _files(config, args, topology), topology.control
        )
    ) is not None:
        reporters.append(files)
    if topology.rank == topology.world_size - 1:
        writers = _writers(config, args)
        if writers is not None:
            reporters.append(writers)
    return Reporters(reporters) if reporters else None


def _files(config: SnipConfig, args: argparse.Namespace, topology: Topology) -> Reporter | None:
    """Rank 0: open the directory and write what was asked for."""
    if topology.rank != 0:
        return None
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
    return FileReporter(directory)


def _writers(config: SnipConfig, args: argparse.Namespace) -> Reporter | None:
    """Last rank: Megatron's writers, where it has made any."""
    from megatron.training import global_vars

    tensorboard: Any = global_vars.get_tensorboard_writer()
    wandb: Any = global_vars.get_wandb_writer()
    if tensorboard is None and wandb is None:
        return None
    settings = config.model_dump(mode="json")
    interval = int(getattr(args, "tensorboard_log_interval", 1) or 1)
    return MegatronWriters(tensorboard, wandb, settings, interval)

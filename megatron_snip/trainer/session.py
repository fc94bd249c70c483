"""A run of the demo: what every rank does before, around and after the training loop.

Without a GPU the CPU patch is installed first and gloo carries the collectives. With GPUs the same
code runs on NCCL. Then only `torch_adam` is patched, where neither Transformer Engine nor Apex is.
"""

import contextlib
import json
import logging
import math
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console

from megatron_snip.collectives import Control
from megatron_snip.directory import check_new_run, run_id
from megatron_snip.divergence.quality_loss import check_divergences
from megatron_snip.errors import SnipError, UsageError, one_line
from megatron_snip.files import write_atomic
from megatron_snip.linears.runtime import MicrobatchTokens
from megatron_snip.log import warn_once_per_job
from megatron_snip.output import console
from megatron_snip.patches import cpu
from megatron_snip.patches.cpu import torch_adam
from megatron_snip.planning.plan import read_plan
from megatron_snip.planning.policies import get_policy
from megatron_snip.reporting.events import Event, Metrics, Writer
from megatron_snip.reporting.lessons import lessons
from megatron_snip.reporting.opening import OldRun, is_directory_of, open_run
from megatron_snip.reporting.run_directory import RunDirectory
from megatron_snip.reporting.run_record import read_run
from megatron_snip.reporting.writers import WandbWriter, added_writers, start_wandb
from megatron_snip.run.controller import SnipController
from megatron_snip.run.healing import scheduled_targets
from megatron_snip.run.state import RunState, resumed_state
from megatron_snip.trainer.checkpoint import (
    Progress,
    load_checkpoint,
    read_progress,
    resume_iteration,
    save_checkpoint,
    settings_of,
)
from megatron_snip.trainer.config import TrainConfig, check_ranks
from megatron_snip.trainer.data import build_datasets
from megatron_snip.trainer.loop import (
    PlainTraining,
    TrainingHook,
    TrainingResult,
    stop_requests,
    train,
)
from megatron_snip.trainer.model import (
    TrainingState,
    build_training_state,
    destroy_parallel_state,
    initialize_parallel_state,
    transformer_config,
)

logger = logging.getLogger(__name__)

PROGRESS_LINES = 20
"""Approximate number of progress lines per run."""


def run_rank(config: TrainConfig) -> None:
    """Every rank of a launcher: train, and write the run's files (rank 0).

    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are set.

    Raises:
        UsageError: if the number of ranks, data or plan do not fit; every rank raises.
        SnipError: if a rank cannot continue.
    """
    is_first = os.environ["RANK"] == "0"
    _set_up_logging(logging.INFO if is_first else logging.WARNING)
    on_cpu = cpu.install()
    if not on_cpu:
        torch_adam.install()
    try:
        check_run(config, int(os.environ["WORLD_SIZE"]))
    except OSError as error:  # a path that is too long, without permission, or a loop of links
        raise UsageError(f"cannot use a path: {one_line(error)}; name another one") from None
    _initialize_process_group(on_cpu)
    initialize_parallel_state(config)
    run_session(config, console() if is_first else None)
    # Not after a failure: other ranks may not come here, and waiting would hide the reason.
    destroy_parallel_state()
    dist.destroy_process_group()


def check_run(config: TrainConfig, world_size: int) -> None:
    """Refuse a run that cannot work; write nothing.

    Raises:
        UsageError: one line with what is wrong and what to do.
    """
    check_ranks(config, world_size)
    try:
        transformer_config(config)
    except (ValueError, AssertionError) as error:
        raise UsageError(f"Megatron refuses the settings: {one_line(error)}") from None
    if config.save_interval and config.save is None:
        raise UsageError("save_interval needs save, a folder of checkpoints")
    if config.snip.enabled:  # each call raises what the run would raise later
        if config.snip.backend == "te":
            raise UsageError(
                "--snip-backend te runs Transformer Engine's linears, and 'megatron-snip train' "
                "builds Megatron's own; use --snip-backend simulate"
            )
        get_policy(config.snip.policy)
        check_divergences(config.snip)
        scheduled_targets(config.snip, config.train_iters)
        if config.snip.plan_file is not None:
            read_plan(config.snip.plan_file)
    done = resume_iteration(config)
    former = read_progress(config, done) if done else None
    check_new_run(config.run_dir, overwrite=_old_run(config, former) != "refuse")


def run_session(config: TrainConfig, screen: Console | None) -> TrainingResult:
    """All ranks, with Megatron's groups initialized: build, load, train, save, write the files.

    Args:
        config: the run's settings, checked.
        screen: for progress and summary on rank 0; None prints nothing.
    """
    control = Control.of_all_ranks()
    done = control.broadcast(resume_iteration(config))
    former = read_progress(config, done) if done else None
    with run_directory(config, former, control) as directory:
        state = build_training_state(config)
        if former is not None:
            load_checkpoint(state, former)
        datasets = build_datasets(config, control)
        writers: list[Writer] = []
        wandb_id = "" if former is None else former.wandb_id
        if directory is not None:
            wandb_id = _add_writers(writers, directory, config, wandb_id)
        if screen is not None:
            writers.append(ProgressWriter(config, screen))
        stops = stop_requests(control) if config.save else nullcontext(lambda: None)
        with stops as stop, closing(make_hook(state, writers, former)) as hook:
            # Nothing of this run was refused, so it may replace the files of an earlier run.
            own_id = _begin_run(directory, datasets.source, control)
            start = former or Progress(0, {})
            settings = settings_of(config, dist.get_world_size())
            own_id, wandb_id = control.broadcast([own_id, wandb_id])
            start = replace(start, settings=settings, run_id=own_id, wandb_id=wandb_id)
            save = partial(save_checkpoint, state, control) if config.save else None
            result = train(state, datasets, hook, start, save, stop)
    if screen is not None:
        _print_result(config, result, screen)
    return result


def _set_up_logging(level: int) -> None:
    logging.basicConfig(level=level, format="%(levelname)s %(message)s", force=True)
    for name in ("megatron", "torch"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # It logs an error, and then raises it.
    logging.getLogger("megatron.core.dist_checkpointing").setLevel(logging.CRITICAL)


def _initialize_process_group(on_cpu: bool) -> None:
    if not on_cpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    is_local = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    if on_cpu and is_local and Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        dist.init_process_group("gloo" if on_cpu else "nccl", timeout=timedelta(minutes=10))
    except (RuntimeError, ValueError) as error:  # no peer, or a port that is in use
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise SnipError(f"the ranks cannot meet at {place}: {one_line(error)}") from error


# ---- the run's files ----------------------------------------------------------------------------


def _old_run(config: TrainConfig, former: Progress | None) -> OldRun:
    """Return what becomes of files in run_dir that another run wrote."""
    if former is None and config.overwrite:
        return "delete"
    # With `load` equal to `save` one command starts and resumes. Files of a run that left no
    # checkpoint are then moved aside.
    return "refuse" if former is None and config.load is None else "archive"


@contextmanager
def run_directory(
    config: TrainConfig, former: Progress | None, control: Control
) -> Iterator[RunDirectory | None]:
    """All ranks: take run_dir; rank 0 gets it.

    Raises:
        UsageError: on every rank, if another job writes there, it cannot be written, or it holds
            another run.
    """
    directory: RunDirectory | None = None

    def prepare() -> None:
        nonlocal directory
        path = config.run_dir
        settings = config.model_dump(mode="json")
        try:
            continues = former is not None and is_directory_of(path, former.run_id)
            directory = open_run(path, settings, continues, _old_run(config, former))
        except OSError as error:
            raise UsageError(str(error)) from None

    control.on_rank_0("opening run_dir", prepare)
    try:
        yield directory
    finally:
        if directory is not None:
            directory.close()


def _begin_run(directory: RunDirectory | None, source: dict[str, object], control: Control) -> str:
    """All ranks: make run_dir this run's; return on rank 0 what identifies the run."""

    def begin() -> None:
        assert directory is not None, "rank 0 has the run's files"
        directory.begin()
        write_atomic(directory.path / "data.json", json.dumps(source) + "\n")

    control.on_rank_0("beginning the run in run_dir", begin)
    return "" if directory is None else run_id(directory.path)


def _add_writers(
    writers: list[Writer], directory: RunDirectory, config: TrainConfig, wandb_id: str
) -> str:
    """Rank 0: add what records the run; return the id of its W&B run, or "".

    Args:
        writers: get the new ones.
        directory: the run's files.
        config: the run's settings.
        wandb_id: the W&B run to continue; empty for a new one.

    Raises:
        UsageError: if W&B cannot be used.
    """
    settings = config.model_dump(mode="json")
    writers += [directory, *added_writers(settings["snip"])]
    if config.wandb_project is None:
        return ""
    wandb = start_wandb(config.wandb_project, directory.path, settings, wandb_id)
    writers.append(WandbWriter(wandb, settings["snip"]))
    return str(wandb.run.id)


def make_hook(state: TrainingState, writers: list[Writer], former: Progress | None) -> TrainingHook:
    """All ranks: return SNIP's controller if it is enabled, else plain training."""
    config = state.config
    done = 0 if former is None else former.iteration
    loaded = None if former is None else former.snip
    if not config.snip.enabled:
        if loaded is not None:
            plan = RunState.from_dict(loaded).plan
            warn_once_per_job(
                logger,
                f"snip: {plan.label}, which is in the checkpoint, is not used, and later "
                "checkpoints do not keep it: this run is without SNIP (--snip continues with the "
                "plan)",
            )
        return PlainTraining(writers)
    snip, warning = resumed_state(loaded, done)
    if warning is not None:
        warn_once_per_job(logger, f"snip: {warning}")
    return SnipController(
        config.snip,
        state.model,
        state.optimizer,
        seed=config.seed,
        writers=writers,
        state=snip,
        tokens=MicrobatchTokens(config.micro_batch_size * config.seq_length),
        train_iters=config.train_iters,
        num_done=done,
    )


# ---- what is printed ----------------------------------------------------------------------------


class ProgressWriter:
    """Prints about `PROGRESS_LINES` lines per run, and those with a validation loss."""

    def __init__(self, config: TrainConfig, screen: Console) -> None:
        self._config = config
        self._screen = screen

    def write(self, event: Event) -> None:
        """Print a line if it is due."""
        if not isinstance(event.payload, Metrics):
            return
        config = self._config
        iteration = event.iteration
        metrics = event.payload.values
        every = max(1, config.train_iters // PROGRESS_LINES)
        if iteration % every and iteration != 1 and "validation_loss" not in metrics:
            return
        parts = [f"iteration {iteration:>5}/{config.train_iters}", f"loss {metrics['loss']:.4f}"]
        if "validation_loss" in metrics:
            parts.append(f"validation {metrics['validation_loss']:.4f}")
        parts.append(f"{metrics['tokens_per_s']:,.0f} tokens/s")
        if config.snip.enabled:
            share = metrics["lowest_precision_fraction"]
            parts.append(f"{config.snip.lowest_formats_label} {100 * share:.0f}%")
        self._screen.print("  ".join(parts))
        sys.stdout.flush()

    def close(self) -> None:
        """Do nothing."""


def _print_result(config: TrainConfig, result: TrainingResult, screen: Console) -> None:
    if math.isnan(result.loss) and result.iterations >= config.train_iters:
        screen.print(f"nothing left to do: {result.iterations} iterations are done")
        return
    end = f", stopped by {result.stopped}" if result.stopped else ""
    took = f"{result.iterations} iterations in {result.seconds:.0f} s"
    lines = [f"{took}, training loss {result.loss:.4f}{end}"]
    if result.stopped and config.save is not None:
        lines.append(f"to resume: the same command with --load {config.save}")
    if result.validation_loss is not None and result.first_validation_loss is not None:
        before = f"{result.first_validation_loss:.4f} before training"
        when = "in the last evaluation" if result.stopped else "after"
        lines.append(f"validation loss {before}, {result.validation_loss:.4f} {when}")
    with contextlib.suppress(UsageError):  # a run whose files could not be written
        lines += lessons(read_run(config.run_dir))
    lines.append(f"next: megatron-snip report {shlex.quote(str(config.run_dir))}")
    screen.print("\n".join(lines), soft_wrap=True)

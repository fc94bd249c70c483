"""A run: checks before it starts, then process group, model, data, hook, loop and files.

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
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from megatron_snip.collectives import Control
from megatron_snip.directory import check_new_run, run_id
from megatron_snip.directory_lease import take_lease
from megatron_snip.errors import SnipError, UsageError, one_line
from megatron_snip.files import write_atomic
from megatron_snip.log import warn_once_per_job
from megatron_snip.output import console
from megatron_snip.patches import cpu
from megatron_snip.patches.cpu import torch_adam
from megatron_snip.planning.plan import read_plan
from megatron_snip.planning.policies import get_policy
from megatron_snip.reporting.events import Event, Metrics, Writer
from megatron_snip.reporting.lessons import lessons
from megatron_snip.reporting.run_directory import OldRun, RunDirectory, open_run
from megatron_snip.reporting.run_record import read_run
from megatron_snip.reporting.writers import (
    TensorBoardWriter,
    WandbWriter,
    added_writers,
    start_wandb,
)
from megatron_snip.run.controller import SnipController
from megatron_snip.run.state import resumed_state
from megatron_snip.trainer.checkpoint import (
    Progress,
    check_new_save,
    checkpoint_path,
    load_checkpoint,
    read_saved_run,
    resume_iteration,
    save_checkpoint,
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

# Checks before a run starts; they write nothing.


def check_run(config: TrainConfig, world_size: int) -> None:
    """Refuse a run that cannot work.

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
    if config.ckpt_step and config.load is None:
        raise UsageError("ckpt_step needs load, a folder of checkpoints")
    iteration = resume_iteration(config)
    if config.save is not None and not (iteration and config.save == config.load):
        check_new_save(config.save)
    if config.snip.enabled:  # each call raises what the run would raise later
        if config.snip.backend == "te":
            raise UsageError(
                "--snip-backend te runs Transformer Engine's linears, and 'megatron-snip train' "
                "builds Megatron's own; use --snip-backend simulate"
            )
        get_policy(config.snip.policy)
        config.snip.targets(config.train_iters)
        if config.snip.plan_file is not None:
            read_plan(config.snip.plan_file)
    check_new_run(config.run_dir, overwrite=_old_run(config, iteration) != "refuse")


def _old_run(config: TrainConfig, done: int) -> OldRun:
    if config.load is not None and done:
        saved = read_saved_run(checkpoint_path(config.load, done))
        if saved.run_id and saved.run_id == run_id(config.run_dir):
            return "continue"
    # A resumed run deletes nothing: the files may be its own, where a checkpoint of an earlier
    # release does not name its run.
    if config.overwrite and not done:
        return "delete"
    # With `load` equal to `save` one command starts and resumes. Files of a run that left no
    # checkpoint are then moved aside.
    starts_and_resumes = config.load is not None and config.load == config.save
    return "archive" if done or starts_and_resumes else "refuse"


def run_rank(config: TrainConfig) -> TrainingResult:
    """Every rank of a launcher: train, and write the run's files (rank 0).

    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are set.

    Raises:
        UsageError: if the number of ranks, data or plan do not fit; every rank raises.
        SnipError: if a rank cannot continue.
    """
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    _set_up_logging(logging.WARNING if rank else logging.INFO)
    try:
        check_run(config, world_size)
    except OSError as error:  # a path that is too long, without permission, or a loop of links
        raise UsageError(f"cannot use a path: {one_line(error)}; name another one") from None
    on_cpu = cpu.install()
    if not on_cpu:
        torch_adam.install()
    _initialize_process_group(on_cpu)
    initialize_parallel_state(config)
    result = run_session(config, None if rank else console())
    # Not after a failure: other ranks may not come here, and waiting would hide the reason.
    destroy_parallel_state()
    dist.destroy_process_group()
    return result


def run_session(config: TrainConfig, console: Console | None) -> TrainingResult:
    """All ranks, with Megatron's groups initialized: build, load, train, save, write the files.

    Args:
        config: The run's settings, checked.
        console: The console for progress and summary on rank 0; None prints nothing.
    """
    control = Control.of_all_ranks()
    done = control.broadcast(resume_iteration(config))
    with run_directories(config, done, control) as directory:
        state = build_training_state(config)
        start = load_checkpoint(state, control, done) if done else None
        datasets = build_datasets(config, control)
        writers = make_writers(config, directory, done)
        if console is not None:
            writers.append(ProgressWriter(config, console))
        stops = stop_requests(control) if config.save else nullcontext(lambda: None)
        with stops as stop, closing(make_hook(state, writers, start)) as hook:
            # Nothing of this run was refused, so it may replace the files of an earlier run.
            identity = begin_run(directory, datasets.source, control)
            save = partial(save_checkpoint, state, control, identity) if config.save else None
            result = train(state, datasets, hook, start, save, stop)
    if console is not None:
        _print_result(config, result, console)
    return result


def make_writers(config: TrainConfig, directory: RunDirectory | None, done: int) -> list[Writer]:
    """Return the writers of this rank: files and dashboards on rank 0.

    Args:
        config: the run's settings.
        directory: the run's files; None on the other ranks.
        done: iterations done before this process.

    Raises:
        UsageError: if W&B or TensorBoard cannot be used.
    """
    if directory is None:
        return []
    settings = config.model_dump(mode="json")
    writers: list[Writer] = [directory, *added_writers(settings["snip"])]
    if config.wandb_project is not None:
        wandb = start_wandb(config.wandb_project, directory.path, settings)
        writers.append(WandbWriter(wandb, settings["snip"]))
    if config.tensorboard_dir is not None:
        writers.append(TensorBoardFiles(config.tensorboard_dir, settings["snip"], done))
    return writers


class TensorBoardFiles:
    """TensorBoard's writer, made at the first event: a run that is refused leaves no files of it.

    Raises:
        UsageError: if tensorboard is not installed, or the folder cannot be made.
    """

    def __init__(self, folder: Path, snip: dict[str, Any], done: int) -> None:
        """Make the folder.

        Args:
            folder: need not exist.
            snip: the settings of SNIP.
            done: iterations done before this process.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UsageError(
                "tensorboard was requested and is not installed; pip install "
                "'megatron-snip[tensorboard]'"
            ) from None
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot use a path: {one_line(error)}; name another one") from None
        purge_step = done + 1 if done else None
        self._make_board = partial(SummaryWriter, str(folder), purge_step=purge_step)
        self._snip = snip
        self._writer: TensorBoardWriter | None = None

    def write(self, event: Event) -> None:
        """Write an event."""
        if self._writer is None:
            threading.excepthook = partial(_thread_failed, threading.excepthook)
            self._writer = TensorBoardWriter(self._make_board(), self._snip)
        self._writer.write(event)

    def close(self) -> None:
        """Put on disk what was written."""
        if self._writer is not None:
            self._writer.close()


def _thread_failed(usual: Callable[[Any], Any], failure: threading.ExceptHookArgs) -> None:
    """Print no traceback of TensorBoard's own thread whose disk is full.

    Each call of TensorBoard raises that error from then on, and is logged as one line.
    """
    is_of_tensorboard = type(failure.thread).__module__.partition(".")[0] == "tensorboard"
    if not (is_of_tensorboard and isinstance(failure.exc_value, OSError)):
        usual(failure)


def make_hook(state: TrainingState, writers: list[Writer], start: Progress | None) -> TrainingHook:
    """All ranks: return SNIP's controller if it is enabled, else plain training."""
    config = state.config
    if start is not None:
        _warn_of_former_run(start, config)
    if not config.snip.enabled:
        return PlainTraining(writers)
    return SnipController(
        config.snip,
        state.model,
        state.optimizer,
        seed=config.seed,
        writers=writers,
        state=None if start is None else start.snip,
        microbatch_tokens=config.micro_batch_size * config.seq_length,
        train_iters=config.train_iters,
        num_done=0 if start is None else start.iteration,
    )


def _warn_of_former_run(start: Progress, config: TrainConfig) -> None:
    """Warn if SNIP was off in the run that wrote the checkpoint and is on now, or the reverse."""
    if config.snip.enabled and start.snip is None:
        _, warning = resumed_state(None, start.iteration)
        warn_once_per_job(logger, f"snip: {warning}")
    if not config.snip.enabled and start.snip is not None:
        warn_once_per_job(
            logger,
            f"snip: {start.snip.plan.label}, which is in the checkpoint, is not used, and later "
            "checkpoints do not keep it: this run is without SNIP (--snip continues with the plan)",
        )


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


@contextmanager
def run_directories(
    config: TrainConfig, done: int, control: Control
) -> Iterator[RunDirectory | None]:
    """All ranks: take the folders that this run writes to; rank 0 gets run_dir.

    When the run begins, files of the run that it continues stay up to iteration `done`. Those of
    another run are then moved to `previous-N` (a run that resumes, or whose `load` is its `save`),
    deleted (a new run with `overwrite`), or they are an error at once.

    Raises:
        UsageError: on every rank, if another job writes there, the folders cannot be written, or
            run_dir holds another run.
    """
    directory: RunDirectory | None = None
    with ExitStack() as locks:

        def prepare() -> None:
            nonlocal directory
            old_run = _old_run(config, done)
            try:
                if config.save is not None and config.save.resolve() != config.run_dir.resolve():
                    locks.callback(take_lease(config.save).release)
                settings = config.model_dump(mode="json")
                directory = open_run(config.run_dir, settings, old_run, done)
                locks.callback(directory.close)
            except OSError as error:
                raise UsageError(str(error)) from None

        control.on_rank_0("opening run_dir and save", prepare)
        yield directory


def begin_run(directory: RunDirectory | None, source: dict[str, Any], control: Control) -> str:
    """All ranks: make run_dir this run's; return on rank 0 what identifies the run.

    Args:
        directory: the run's files; None on the other ranks.
        source: where the data comes from.
        control: the control plane of all ranks.

    Raises:
        SnipError: on every rank, if run_dir cannot be written.
    """

    def begin() -> None:
        assert directory is not None, "rank 0 has the run's files"
        directory.begin()
        write_atomic(directory.path / "data.json", json.dumps(source) + "\n")

    control.on_rank_0("beginning the run in run_dir", begin)
    return "" if directory is None else run_id(directory.path)


class ProgressWriter:
    """Prints about `PROGRESS_LINES` lines per run, and those with a validation loss."""

    def __init__(self, config: TrainConfig, console: Console) -> None:
        self._config = config
        self._console = console

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
        self._console.print("  ".join(parts))
        sys.stdout.flush()

    def close(self) -> None:
        """Do nothing."""


def _print_result(config: TrainConfig, result: TrainingResult, console: Console) -> None:
    if math.isnan(result.loss) and result.iterations >= config.train_iters:
        console.print(f"nothing left to do: {result.iterations} iterations are done")
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
    console.print("\n".join(lines), soft_wrap=True)

"""One rank's run: process group, model, data, hook, loop, files.

Without a GPU the CPU patch is put in place first, and gloo carries the collectives. With GPUs the
same code runs on NCCL, unpatched.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.logging import RichHandler

from megatron_snip.collectives import broadcast_json
from megatron_snip.controller import SnipController
from megatron_snip.directory import (
    DirectoryLock,
    archive_run,
    lock_directory,
    mark,
    own_files,
    remove_run,
)
from megatron_snip.errors import UsageError
from megatron_snip.files import write_atomic
from megatron_snip.patches import cpu, torch_adam
from megatron_snip.reporting.events import Writer
from megatron_snip.reporting.run_directory import RunDirectory
from megatron_snip.reporting.summary import SummaryWriter
from megatron_snip.reporting.writers import TensorBoardWriter, WandbWriter, start_wandb
from megatron_snip.trainer.checkpoint import Checkpoints, Progress
from megatron_snip.trainer.checks import check_run, check_run_dir, resume_step
from megatron_snip.trainer.config import TrainConfig
from megatron_snip.trainer.data import build_datasets
from megatron_snip.trainer.hooks import PlainTraining, TrainingHook
from megatron_snip.trainer.loop import TrainingResult, train
from megatron_snip.trainer.model import TrainingState, build_training_state
from megatron_snip.trainer.parallel import (
    destroy_parallel_state,
    initialize_parallel_state,
)
from megatron_snip.trainer.progress import print_summary, show_progress
from megatron_snip.trainer.resume import keep_steps_before
from megatron_snip.trainer.saver import Saver
from megatron_snip.trainer.stop import StopRequests


def run_rank(config: TrainConfig) -> TrainingResult:
    """Every rank of a launcher: train, write the run's files (rank 0), and leave.

    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are set.

    Raises:
        UsageError: if the number of ranks does not fit the settings, or data or plan do not.
        SnipError: if a rank cannot go on; every rank raises.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    console = _console() if rank == 0 else None
    set_up_logging(console)
    check_run(config, world_size)
    on_cpu = cpu.install()
    if not on_cpu:
        torch_adam.install()
    with _process_group(config, on_cpu):
        initialize_parallel_state(config)
        result = run_session(config, console)
        destroy_parallel_state()
    return result


def run_session(config: TrainConfig, console: Console | None) -> TrainingResult:
    """All ranks, within Megatron's groups: build, load, train, save, write the run's files.

    Args:
        config: the run's settings, checked.
        console: where rank 0 shows how it goes; None shows nothing.
    """
    control = _control_group()
    step = broadcast_json(resume_step(config), control)
    with _written_directories(config, step, control) as directory:
        return _train(config, console, control, step, directory)


def _train(
    config: TrainConfig,
    console: Console | None,
    control: dist.ProcessGroup,
    step: int,
    directory: RunDirectory | None,
) -> TrainingResult:
    state = build_training_state(config, dist.get_world_size())
    checkpoints = Checkpoints(config, state, control)
    start = checkpoints.load(step) if step else None
    datasets = build_datasets(config, control)
    if directory is not None:
        write_atomic(directory.path / "data.json", json.dumps(datasets.source) + "\n")
    summary = SummaryWriter()
    writers = make_writers(config, directory, summary, step)
    with (
        _stop_requests(config, control) as requests,
        closing(make_hook(config, state, writers, start)) as hook,
        show_progress(config, console) as listener,
    ):
        saver = Saver(config, checkpoints, requests, hook.state)
        result = train(config, state, datasets, hook, listener, start, saver)
    if console is not None:
        wide = console if console.is_terminal else _console(120)  # a pipe has no width
        for table in summary.tables():
            wide.print(table)
        print_summary(config, result, console, _written(config.run_dir))
    return result


def _console(width: int | None = None) -> Console:
    """Return a console that prints names as they are: a folder may be called `[/runs]`."""
    return Console(width=width, markup=False, emoji=False)


def make_writers(
    config: TrainConfig,
    directory: RunDirectory | None,
    summary: SummaryWriter,
    done: int = 0,
) -> list[Writer]:
    """Return this rank's writers: files, summary and dashboards on rank 0.

    Args:
        config: the run's settings.
        directory: the run's files; None on ranks that report nothing.
        summary: another writer.
        done: iterations done before this process.
    """
    if directory is None:
        return []
    writers: list[Writer] = [directory, summary]
    settings = config.model_dump(mode="json")
    if config.wandb_project is not None:
        wandb = start_wandb(config.wandb_project, directory.path, settings)
        writers.append(WandbWriter(wandb, settings["snip"]))
    if config.tensorboard_dir is not None:
        from torch.utils.tensorboard import SummaryWriter as TensorBoardFiles

        files = TensorBoardFiles(str(config.tensorboard_dir), purge_step=done or None)
        writers.append(TensorBoardWriter(files, settings["snip"]))
    return writers


def make_hook(
    config: TrainConfig,
    state: TrainingState,
    writers: list[Writer],
    start: Progress | None = None,
) -> TrainingHook:
    """All ranks: return SNIP's controller if it is enabled, else plain training.

    Args:
        config: the run's settings.
        state: the model and its optimizer.
        writers: record events.
        start: continue from here.
    """
    if not config.snip.enabled:
        return PlainTraining(writers)
    snip = None if start is None else start.snip
    model, optimizer = state.runner.model, state.optimizer
    return SnipController(config.snip, model, optimizer, writers=writers, state=snip)


def set_up_logging(console: Console | None) -> None:
    """Log to the console on rank 0, and only warnings of other ranks to stderr."""
    handler: logging.Handler = logging.StreamHandler()
    if console is not None and console.is_terminal:
        # Lines then appear above the progress bar.
        handler = RichHandler(console=console, show_path=False, show_time=False)
    logging.basicConfig(
        level=logging.WARNING if console is None else logging.INFO,
        format="%(message)s" if isinstance(handler, RichHandler) else "%(levelname)s %(message)s",
        handlers=[handler],
        force=True,
    )
    for name in ("megatron", "torch"):
        logging.getLogger(name).setLevel(logging.WARNING)


@contextmanager
def _process_group(config: TrainConfig, on_cpu: bool) -> Iterator[None]:
    """Join the process group; leave it at the end, but not after a failure.

    After a failure other ranks may never come to leave it, and waiting for them would hide why.
    """
    if on_cpu:
        _use_loopback()
    else:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = config.distributed_backend or ("gloo" if on_cpu else "nccl")
    if backend == "nccl" and on_cpu:
        raise UsageError("distributed_backend nccl needs GPUs, and there are none; use gloo")
    timeout = timedelta(minutes=config.distributed_timeout_minutes)
    dist.init_process_group(backend, timeout=timeout)
    yield
    dist.destroy_process_group()


def _control_group() -> dist.ProcessGroup:
    """All ranks: return a group of all of them that carries CPU tensors."""
    world = dist.group.WORLD
    assert world is not None, "the process group was joined before"
    if dist.get_backend() == "gloo":
        return world
    group: dist.ProcessGroup = dist.new_group(backend="gloo")
    return group


def _use_loopback() -> None:
    """Let gloo talk over the loopback interface where all ranks are on this machine."""
    local = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    if local and Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _stop_requests(
    config: TrainConfig, group: dist.ProcessGroup
) -> AbstractContextManager[StopRequests]:
    """Return what listens for signals; without a folder to save in they end the run at once."""
    requests = StopRequests(group)
    return nullcontext(requests) if config.save is None else requests


@contextmanager
def _written_directories(
    config: TrainConfig, step: int, control: dist.ProcessGroup
) -> Iterator[RunDirectory | None]:
    """All ranks: lock and prepare what this run writes to; rank 0 gets the run directory.

    Raises:
        UsageError: on every rank, if another job writes there.
    """
    locks: list[DirectoryLock] = []
    directory: RunDirectory | None = None
    failure = {}
    if dist.get_rank() == 0:
        try:
            for path in dict.fromkeys(p for p in (config.run_dir, config.save) if p is not None):
                locks.append(lock_directory(path))
            directory = _start_run(config, step)
        except (UsageError, OSError) as error:
            failure = {"error": str(error)}
    try:
        failure = broadcast_json(failure, control)
        if failure:
            raise UsageError(failure["error"])
        yield directory
    finally:
        for lock in locks:
            lock.release()


def _start_run(config: TrainConfig, step: int) -> RunDirectory:
    """Rank 0: make room for this run's files, or keep those of its first `step` steps."""
    check_run_dir(config)
    mark(config.run_dir)
    if step:
        keep_steps_before(config.run_dir, step)
    elif config.overwrite:
        remove_run(config.run_dir)
    else:
        archive_run(config.run_dir)
    directory = RunDirectory(config.run_dir)
    directory.start(config.model_dump(mode="json"))
    return directory


def _written(run_dir: Path) -> list[Path]:
    names = sorted({path.relative_to(run_dir).parts[0] for path in own_files(run_dir)})
    return [run_dir / name for name in names]

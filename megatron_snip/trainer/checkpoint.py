"""Checkpoints in Megatron's distributed format, which every parallel layout can read.

    FOLDER/iter_0000040/                        the checkpoint after 40 iterations
    FOLDER/latest_checkpointed_iteration.txt    the iteration to resume from; written last

A run that is killed while it saves leaves the file at the checkpoint before. A resumed run then
saves over what is left. On a CPU, in the same layout, it is bitwise the run that never stopped.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.utils import unwrap_model
from pydantic import Field
from torch.distributed.checkpoint.api import CheckpointException

from megatron_snip.collectives import Control
from megatron_snip.errors import SnipError, UsageError, one_line
from megatron_snip.files import checked, read_text, write_atomic
from megatron_snip.trainer.config import ModelFields, ParallelFields, TrainConfig
from megatron_snip.trainer.model import TrainingState

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Each ends a run with `save`, after a last checkpoint."""

POINTER = "latest_checkpointed_iteration.txt"

MODEL_FIELDS = (*ModelFields.model_fields, "bf16", "use_distributed_optimizer")
"""Settings that the tensors of a checkpoint depend on."""


@dataclass(frozen=True)
class Progress:
    """A run between two iterations: all of a checkpoint but the tensors.

    Attributes:
        iteration: Number of iterations done; it determines the next samples.
        settings: The settings of the run, and its number of ranks.
        first_validation_loss: Loss of the evaluation before the first iteration; None without one.
        validation_loss: Loss of the last evaluation; None without one.
        snip: The controller's state, as `RunState.to_dict` returned it; None without SNIP.
        run_id: Identifies the run whose files go on with it (`directory.run_id`).
        wandb_id: The W&B run to continue; empty without one.
    """

    iteration: Annotated[int, Field(ge=0)]
    settings: dict[str, Any]
    first_validation_loss: float | None = None
    validation_loss: float | None = None
    snip: dict[str, Any] | None = None
    run_id: str = ""
    wandb_id: str = ""


def settings_of(config: TrainConfig, world_size: int) -> dict[str, Any]:
    """Return what a checkpoint keeps of the settings: the model and its layout."""
    names = dict.fromkeys((*MODEL_FIELDS, *ParallelFields.model_fields))
    return {**{name: getattr(config, name) for name in names}, "world_size": world_size}


def checkpoint_path(folder: Path, iteration: int) -> Path:
    """Return the path of the checkpoint after `iteration` iterations."""
    return folder / f"iter_{iteration:07d}"


def latest_iteration(folder: Path) -> int | None:
    """Return the iteration that the pointer names, or None without one.

    Raises:
        UsageError: if the pointer is damaged.
    """
    pointer = folder / POINTER
    if not pointer.exists():
        return None
    text = read_text(pointer, f"'{pointer}'", plain=True).strip()
    if not text.isdecimal() or len(text) > 18:
        raise UsageError(f"'{pointer}' must hold a number of iterations, got '{text[:40]}'")
    return int(text)


def resume_iteration(config: TrainConfig) -> int:
    """Return how many iterations are done in the checkpoint to load; 0 for a new run.

    Raises:
        UsageError: if there is none to load, or a new run would save over another run's.
    """
    is_same = config.load and config.save and config.load.resolve() == config.save.resolve()
    found = None if config.load is None else latest_iteration(config.load)
    if config.load is not None and found is None and not is_same:
        raise UsageError(
            f"load '{config.load}' holds no checkpoint; name the folder that --save wrote to, or "
            "drop --load to start a new run"
        )
    others = None if config.save is None or is_same else latest_iteration(config.save)
    if others is not None:
        raise UsageError(
            f"save '{config.save}' holds checkpoints of another run, up to iteration {others}; "
            f"resume from them (--load {config.save}) or name another folder"
        )
    return found or 0


def read_progress(config: TrainConfig, iteration: int) -> Progress:
    """Return what the checkpoint to load holds besides tensors.

    Raises:
        UsageError: if it is damaged, or of another model.
    """
    assert config.load is not None, "`load` is set"
    path = checkpoint_path(config.load, iteration)
    try:
        common = dist_checkpointing.load_common_state_dict(str(path))
        values = {each.name: common[each.name] for each in fields(Progress)}
    except Exception as error:  # missing or damaged files, or no checkpoint of this trainer
        raise UsageError(f"cannot load '{path}': {_reason(error)}") from error
    progress = checked(Progress, values, f"load: '{path}' is damaged")
    for name in MODEL_FIELDS:
        former = progress.settings.get(name)
        if former != getattr(config, name):
            change = f"{name} {former} -> {getattr(config, name)}"
            raise UsageError(f"load: '{path}' is of another model: {change}")
    return progress


def save_checkpoint(state: TrainingState, control: Control, progress: Progress) -> None:
    """All ranks: write a checkpoint to the settings' `save`.

    Args:
        state: model, optimizer, scheduler and settings.
        control: the control plane of all ranks.
        progress: what a resumed run needs besides tensors.

    Raises:
        SnipError: if it cannot be written; the checkpoint before stays the one to resume from.
    """
    folder = state.config.save
    assert folder is not None, "`save` is set"
    path = checkpoint_path(folder, progress.iteration)
    make = partial(path.mkdir, parents=True, exist_ok=True)
    control.on_rank_0("creating the checkpoint's folder", make)
    with state.gathered():
        content = _template(state, loading=False) | _random_streams() | vars(progress)
        content["opt_param_scheduler"] = state.scheduler.state_dict()
        try:
            with _signals_held():
                dist_checkpointing.save(content, str(path))
        except (Exception, CheckpointException) as error:
            if dist.get_rank() != 0:
                time.sleep(1)  # only rank 0 knows the reason: it shall fail first
            raise SnipError(f"cannot save '{path}': {_reason(error)}") from error
    name = partial(write_atomic, folder / POINTER, f"{progress.iteration}\n")
    control.on_rank_0("naming the checkpoint", name)


def load_checkpoint(state: TrainingState, progress: Progress) -> None:
    """All ranks: load the tensors of the settings' `load`.

    Args:
        state: receives the weights and the states of optimizer and scheduler.
        progress: what `read_progress` returned.

    Raises:
        SnipError: on every rank, if it is damaged or Megatron cannot read it in this layout.
    """
    assert state.config.load is not None, "`load` is set"
    path = checkpoint_path(state.config.load, progress.iteration)
    content = _template(state, loading=True)
    # Ranks of another layout have no use for these ranks' streams: they start new ones.
    is_same_layout = progress.settings == settings_of(state.config, dist.get_world_size())
    if is_same_layout:
        content |= _random_streams()
    try:
        loaded = dist_checkpointing.load(content, str(path))
        for name, chunk in _chunks(state).items():
            chunk.load_state_dict(loaded[name])
        state.optimizer.load_state_dict(loaded["optimizer"])
        state.scheduler.load_state_dict(loaded["opt_param_scheduler"])
        if is_same_layout:
            _set_random_streams(loaded)
    except (Exception, CheckpointException) as error:
        raise SnipError(f"cannot load '{path}': {_reason(error)}") from error


@contextmanager
def _signals_held() -> Iterator[None]:
    """Block stop signals in this thread, and so in the processes that Megatron starts for a save.

    Slurm and Ctrl-C signal these processes too, which would end them and with them the save. Other
    threads still receive the signal, so the run stops after the iteration as usual.
    """
    resource_tracker.ensure_running()  # to start it later would unblock the signals
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _template(state: TrainingState, loading: bool) -> dict[str, Any]:
    """Return the sharded state of model and optimizer; any layout can load it."""
    metadata = {  # of Megatron's own checkpoints
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    content: dict[str, Any] = {
        name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in _chunks(state).items()
    }
    content["optimizer"] = state.optimizer.sharded_state_dict(
        content, is_loading=loading, metadata=metadata
    )
    return content


def _chunks(state: TrainingState) -> dict[str, Any]:
    """Return the GPTModels of this rank by Megatron's names."""
    chunks = unwrap_model(list(state.model))
    names = ["model"] if len(chunks) == 1 else [f"model{i}" for i in range(len(chunks))]
    return dict(zip(names, chunks, strict=True))


def _reason(error: BaseException) -> str:
    """Return the cause of an error in one line; torch's CheckpointException lists it by rank."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {one_line(error)}"


def _random_streams() -> dict[str, Any]:
    streams = {"cpu": torch.get_rng_state(), **get_cuda_rng_tracker().get_states()}
    if torch.cuda.is_available():
        streams["cuda"] = torch.cuda.get_rng_state()
    named = {f"random.{dist.get_rank()}.{name}": stream for name, stream in streams.items()}
    return {key: ShardedTensor.from_rank_offsets(key, stream) for key, stream in named.items()}


def _set_random_streams(loaded: dict[str, Any]) -> None:
    prefix = f"random.{dist.get_rank()}."
    streams = {k.removeprefix(prefix): v for k, v in loaded.items() if k.startswith(prefix)}
    torch.set_rng_state(streams.pop("cpu"))
    if "cuda" in streams:
        torch.cuda.set_rng_state(streams.pop("cuda"))
    get_cuda_rng_tracker().set_states(streams)

"""Checkpoints. On the CPU, in the same layout, a resumed run is bitwise one that never stopped.

    FOLDER/iter_0000040/                           a complete checkpoint after 40 iterations
    FOLDER/iter_0000040/run.json                   settings, versions, SHA-256 of the other files
    FOLDER/.iter_0000060.partial/                  a checkpoint that is being written
    FOLDER/latest_checkpointed_iteration.txt       the iteration to resume from, written last

The names and the format (`torch_dist`) are Megatron's. A checkpoint is written to its partial
folder, hashed, renamed, and then named by the pointer. A run that is killed leaves the pointer at a
complete checkpoint, unless it was just replacing that one (--ckpt-step names another). The next run
that saves removes partial folders. Loading checks the digests.

The state dict holds (tensors as global tensors, so that other layouts can read them):

    model, model0 ..          weights of every chunk
    optimizer                 FP32 master weights and moments
    opt_param_scheduler       learning rate and weight decay
    iteration                 iterations done; it determines the next samples
    validation                losses of the first and the last evaluation
    snip                      the controller's state
    random.<rank>.<name>      the random streams of a rank; another layout starts new ones
"""

import hashlib
import json
import logging
import os
import re
import shutil
import signal
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.utils import unwrap_model
from pydantic import Field
from torch.distributed.checkpoint.api import CheckpointException

from megatron_snip.collectives import Control
from megatron_snip.errors import SnipError, UsageError, one_line, shortened
from megatron_snip.files import Label, read_json, read_record, read_text, write_atomic
from megatron_snip.run.state import RunState
from megatron_snip.trainer.config import ModelFields, ParallelFields, TrainConfig
from megatron_snip.trainer.model import TrainingState
from megatron_snip.version import versions

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Each ends a run with `save`, after a last checkpoint."""

POINTER = "latest_checkpointed_iteration.txt"
SETTINGS = "run.json"
SCHEMA_VERSION = 2

_PARTIAL = re.compile(r"\.iter_\d{7,}(\.replaced)?\.partial")

MODEL_FIELDS = (*ModelFields.model_fields, "bf16", "use_distributed_optimizer")
"""Settings that the tensors of a checkpoint depend on."""

LAYOUT_FIELDS = tuple(n for n, f in ParallelFields.model_fields.items() if f.annotation is not bool)


@dataclass(frozen=True)
class Progress:
    """A run between two iterations.

    Attributes:
        iteration: Number of iterations done.
        first_validation_loss: Loss of the evaluation before the first iteration; None without one.
        validation_loss: Loss of the last evaluation; None without one.
        snip: The controller's state; None without SNIP.
    """

    iteration: int
    first_validation_loss: float | None
    validation_loss: float | None
    snip: RunState | None = None


FileName = Annotated[Label, Field(pattern=r"^[\w.-]*\w[\w.-]*$")]
"""A file in a checkpoint's own folder."""


@dataclass(frozen=True)
class SavedRun:
    """The run that wrote a checkpoint.

    Attributes:
        config: The settings of the run as plain values.
        world_size: The number of its ranks.
        files: SHA-256 (hex) of each file, by the file's name.
        run_id: what identifies the run in the marker of its directory (`directory.run_id`).
    """

    config: dict[str, Any]
    world_size: Annotated[int, Field(ge=1, le=2**31)]
    files: dict[FileName, Label]
    run_id: str = ""


def checkpoint_path(folder: Path, iteration: int) -> Path:
    """Return the path of the checkpoint after `iteration` iterations."""
    return folder / f"iter_{iteration:07d}"


def latest_iteration(folder: Path) -> int | None:
    """Return the iteration that the pointer names, or None without one.

    Raises:
        UsageError: if the pointer or the checkpoint that it names is damaged.
    """
    pointer = folder / POINTER
    if not pointer.exists():
        return None
    text = read_text(pointer, f"'{pointer}'", plain=True).strip()
    if not text.isdecimal() or len(text) > 18:
        raise UsageError(f"'{pointer}' must hold a number of iterations, got '{text[:40]}'")
    read_saved_run(checkpoint_path(folder, int(text)))
    return int(text)


def read_saved_run(path: Path) -> SavedRun:
    """Read the run.json of a checkpoint.

    Raises:
        UsageError: if the checkpoint is incomplete, damaged or of another version.
    """
    for name in ("metadata.json", SETTINGS):
        if not (path / name).is_file():
            raise UsageError(f"'{path}' is not a complete checkpoint of this trainer: no '{name}'")
    file = path / SETTINGS
    value = read_json(file, "checkpoint settings", plain=True)
    source = f"checkpoint settings '{file}'"
    return read_record(SavedRun, value, source, SCHEMA_VERSION)


def resume_iteration(config: TrainConfig) -> int:
    """Return how many iterations are done in the checkpoint to load; 0 for a new run.

    Raises:
        UsageError: if the checkpoint does not exist, is incomplete, or does not fit the settings.
    """
    if config.load is None:
        return 0
    if config.ckpt_step:
        _check_exists(config.load, config.ckpt_step)
    iteration = config.ckpt_step or latest_iteration(config.load)
    if iteration is not None:
        _check_resume(config, checkpoint_path(config.load, iteration))
    elif config.load != config.save:
        raise UsageError(
            f"load '{config.load}' holds no checkpoint; name the folder that --save wrote to, or "
            "drop --load to start a new run"
        )
    return iteration or 0


def _check_exists(folder: Path, iteration: int) -> None:
    """Refuse an iteration that has no checkpoint, and list those that have one."""
    if checkpoint_path(folder, iteration).exists():
        return
    names = [path.name.removeprefix("iter_") for path in folder.glob("iter_*")]
    found = sorted(int(name) for name in names if name.isdecimal())
    there = f"there are {', '.join(map(str, found))}" if found else "it holds no checkpoint"
    raise UsageError(f"ckpt_step: no checkpoint of iteration {iteration} in '{folder}'; {there}")


def check_new_save(save: Path) -> None:
    """Refuse a folder whose checkpoints a new run would replace.

    Raises:
        UsageError: if it holds checkpoints.
    """
    latest = latest_iteration(save)
    found = next(save.glob("iter_*"), None)
    if latest is not None:
        raise UsageError(
            f"save '{save}' holds checkpoints of another run, up to iteration {latest}; "
            f"resume from them (--load {save}) or name another folder"
        )
    if found is not None:  # it would be replaced
        raise UsageError(
            f"save '{save}' holds '{found.name}' but no '{POINTER}'; resume from a checkpoint "
            f"(--load {save} --ckpt-step N) or name another folder"
        )


def _check_resume(config: TrainConfig, source: Path) -> None:
    """Refuse a checkpoint of another model, or one that Megatron cannot convert to the layout."""
    old = read_saved_run(source).config
    new = config.model_dump(mode="json")
    for name in MODEL_FIELDS:
        if old.get(name) != new[name]:
            change = f"{name} {old.get(name)} -> {new[name]}"
            raise UsageError(f"load: '{source}' is of another model: {change}")
    name = "expert_model_parallel_size"
    if not isinstance(old.get(name), int):
        raise UsageError(
            f"checkpoint settings '{source / SETTINGS}': config.{name}: must be an integer, got "
            f"{shortened(repr(old.get(name)), 80)}"
        )
    if (old[name] > 1) != (new[name] > 1):
        raise UsageError(
            f"load: '{source}' has {name} {old[name]}, not {new[name]}: Megatron cannot convert "
            "the optimizer between experts on every rank and distributed experts"
        )


@contextmanager
def _signals_held() -> Iterator[None]:
    """Block stop signals in this thread, and so in the processes that Megatron starts for a save.

    torchrun and Slurm signal these processes too, which would end them and with them the save.
    Other threads still receive the signal, so the run stops after the iteration as usual.
    """
    resource_tracker.ensure_running()  # to start it later would unblock the signals
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def save_checkpoint(
    state: TrainingState, control: Control, run_id: str, progress: Progress
) -> None:
    """All ranks: write a checkpoint to the settings' `save`.

    Args:
        state: model, optimizer, scheduler and settings.
        control: the control plane of all ranks.
        run_id: what identifies the run; that of rank 0 counts.
        progress: The progress that a resumed run needs.

    Raises:
        SnipError: if it cannot be written; earlier checkpoints are untouched. After an error
            in Megatron a rank may raise while others still wait: the job must end.
    """
    assert state.config.save is not None, "`save` is set"
    path = checkpoint_path(state.config.save, progress.iteration)
    partial = path.with_name(f".{path.name}.partial")
    control.on_rank_0("creating the checkpoint's folder", lambda: make_partial(partial))
    with state.gathered():
        content = _template(state, loading=False) | _random_streams()
        content |= {
            "iteration": progress.iteration,
            "validation": [progress.first_validation_loss, progress.validation_loss],
            "opt_param_scheduler": state.scheduler.state_dict(),
            "snip": None if progress.snip is None else progress.snip.to_dict(),
        }
        # Megatron then starts its queue process anew, with the signals blocked.
        setattr(filesystem_async, "_results_queue", None)  # noqa: B010
        try:
            with _signals_held():
                dist_checkpointing.save(content, str(partial))
        except (Exception, CheckpointException) as error:
            if dist.get_rank() == 0:
                shutil.rmtree(partial, ignore_errors=True)
            else:
                time.sleep(1)  # only rank 0 knows the reason: it shall fail first
            raise SnipError(f"cannot save '{path}': {_reason(error)}") from error
    names = control.broadcast([file.name for file in sorted(partial.glob("*"))])
    content = {
        "version": SCHEMA_VERSION,
        "iteration": progress.iteration,
        "world_size": dist.get_world_size(),
        "run_id": run_id,
        "versions": versions(),
        "config": state.config.model_dump(mode="json"),
        "files": _digests(partial, names, control),
    }
    text = json.dumps(content, indent=1) + "\n"
    control.on_rank_0("finishing the checkpoint", lambda: finish_checkpoint(path, partial, text))


def load_checkpoint(state: TrainingState, control: Control, iteration: int) -> Progress:
    """All ranks: load the checkpoint of the settings' `load` after `iteration` iterations.

    Args:
        state: Receives the weights and the states of optimizer and scheduler.
        control: The control plane of all ranks.
        iteration: The iteration that `resume_iteration` returned.

    Raises:
        SnipError: on every rank, if it is damaged or Megatron cannot read it.
    """
    config = state.config
    assert config.load is not None, "`load` is set"
    path = checkpoint_path(config.load, iteration)
    run = read_saved_run(path)
    found = _digests(path, sorted(run.files), control)
    for name, digest in run.files.items():
        if found[name] != digest:
            raise UsageError(
                f"load: '{path / name}' does not match the SHA-256 in {SETTINGS}: it is damaged or "
                "changed; load another checkpoint with --ckpt-step"
            )
    new = config.model_dump(mode="json")
    same_layout = run.world_size == dist.get_world_size() and all(
        run.config.get(name) == new[name] for name in LAYOUT_FIELDS
    )
    content = _template(state, loading=True)
    if same_layout:  # other ranks have no use for these ranks' streams
        content |= _random_streams()
    try:
        loaded = dist_checkpointing.load(content, str(path))
    except (Exception, CheckpointException) as error:
        raise SnipError(f"cannot load '{path}': {_reason(error)}") from error
    for name, chunk in _chunks(state).items():
        chunk.load_state_dict(loaded[name])
    state.optimizer.load_state_dict(loaded["optimizer"])
    state.scheduler.load_state_dict(loaded["opt_param_scheduler"])
    if same_layout:
        _set_random_streams(loaded)
    elif dist.get_rank() == 0 and (config.attention_dropout or config.hidden_dropout):
        logger.warning("load: another layout than the checkpoint's: new dropout streams")
    snip = loaded.get("snip")
    state_of_snip = None if snip is None else RunState.from_dict(snip)
    first, last = _validation_losses(loaded.get("validation"), path)
    return Progress(iteration, first, last, state_of_snip)


def _validation_losses(value: Any, path: Path) -> tuple[float | None, float | None]:
    """Return the two losses of a checkpoint; a file that can be loaded may still hold anything."""
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or not all(each is None or isinstance(each, float) for each in value):
        text = f"load: '{path}' is damaged: validation must hold two losses"
        raise UsageError(f"{text}, got {shortened(repr(value), 80)}; load another checkpoint")
    first, last = value
    return first, last


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


def _digests(folder: Path, names: list[str], control: Control) -> dict[str, str]:
    """All ranks: hash the files, each rank a share; of an unreadable file the error."""
    share = names[dist.get_rank() :: dist.get_world_size()]

    def own() -> dict[str, str]:
        return {name: _sha256(folder / name) for name in share}

    parts = control.gather("hashing the checkpoint", own).distinct()
    return {name: digest for part in parts for name, digest in part.items()}


def make_partial(partial: Path) -> None:
    """Make the folder of a new checkpoint; remove partial folders that killed runs left."""
    partial.parent.mkdir(parents=True, exist_ok=True)
    for stale in partial.parent.glob(".iter_*.partial"):
        if _PARTIAL.fullmatch(stale.name):
            shutil.rmtree(stale)
    partial.mkdir()


def finish_checkpoint(path: Path, partial: Path, settings: str) -> None:
    """Turn a written partial folder into the checkpoint that the pointer names."""
    write_atomic(partial / SETTINGS, settings)
    replaced = path.with_name(f".{path.name}.replaced.partial")
    if path.exists():  # the run was resumed from an earlier checkpoint
        os.rename(path, replaced)
    os.rename(partial, path)
    # write_atomic syncs the folder, which makes the rename durable too.
    write_atomic(path.parent / POINTER, f"{int(path.name.removeprefix('iter_'))}\n")
    shutil.rmtree(replaced, ignore_errors=True)


def _sha256(file: Path) -> str:
    try:
        if not stat.S_ISREG(file.lstat().st_mode):  # a link, or a device that never ends
            return "unreadable: no regular file"
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        return f"unreadable: {error.strerror}"


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

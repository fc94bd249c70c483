"""Checkpoints, such that the run that goes on is bitwise the run that never stopped.

What is kept (names of the state dict; Megatron's distributed format, `torch_dist`):

    model, model0 ..          weights of every chunk, by global name
    optimizer                 FP32 master weights and moments, shard by shard
    opt_param_scheduler       learning rate and weight decay
    iteration                 training steps done; the samples of a step are a function of it
    validation                losses of the first and the last evaluation
    snip                      the controller's state: plan, history, the problem being solved
    random.<rank>.<name>      every random stream of a rank, as bytes

Tensors are written as global tensors, so another layout can read them (the distributed optimizer's
only if it was written fully reshardable); the random streams belong to a layout, and another one
starts its own. Everything but tensors is plain types in `common.pt`,
read with `weights_only=True`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed import ProcessGroup

from megatron_snip.collectives import attempt
from megatron_snip.errors import SnipError
from megatron_snip.state import ControllerState
from megatron_snip.trainer.checkpoint_folder import CheckpointFolder, SavedRun, layout_changes
from megatron_snip.trainer.config import TrainConfig
from megatron_snip.trainer.model import TrainingState

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Progress:
    """Where a run stands between two steps.

    Attributes:
        step: training steps done.
        first_validation_loss: before the first step; None where nothing was evaluated.
        validation_loss: of the last evaluation; None where nothing was evaluated.
        snip: the controller's state; None without SNIP.
    """

    step: int = 0
    first_validation_loss: float | None = None
    validation_loss: float | None = None
    snip: ControllerState | None = None


class Checkpoints:
    """Saves and loads; every method is called by all ranks together.

    Attributes:
        saved: the step of the last checkpoint that this run has loaded or saved in `save`.
    """

    def __init__(
        self, config: TrainConfig, state: TrainingState, group: ProcessGroup | None
    ) -> None:
        """Args are the run's settings, what is kept, and a group of all ranks for CPU tensors."""
        self._config = config
        self._state = state
        self._group = group
        self._leader = dist.get_rank() == 0
        self.saved: int | None = None

    def save(self, progress: Progress) -> Path | None:
        """All ranks: write a checkpoint whole; return where it lies, None if it was there.

        Raises:
            SnipError: on every rank, if the folder cannot be written.
        """
        assert self._config.save is not None, "asked to save without `save`"
        if self.saved == progress.step:
            return None
        folder = CheckpointFolder(self._config.save)
        partial = folder.partial(progress.step)
        run = SavedRun(self._config.model_dump(mode="json"), dist.get_world_size())
        self._lead("making the checkpoint's folder", lambda: folder.begin(progress.step))
        with self._state.runner.gathered():
            # Names refer to what is gathered, and writing ends before training goes on.
            content = self._template(run, loading=False) | _plain(progress, self._state)
            content |= _random_streams()
            dist_checkpointing.save(content, str(partial))
        self._lead("finishing the checkpoint", lambda: folder.finish(progress.step, run))
        self.saved = progress.step
        return folder.of_step(progress.step)

    def load(self, step: int) -> Progress:
        """All ranks: read the checkpoint after `step` steps, which `check_run` has looked at.

        Raises:
            SnipError: if Megatron cannot read it.
        """
        assert self._config.load is not None, "asked to load without `load`"
        folder = CheckpointFolder(self._config.load)
        run = folder.saved_run(step)
        content = self._template(run, loading=True)
        same_layout = self._is_same_layout(run)
        if same_layout:
            content |= _random_streams()
        try:
            loaded = dist_checkpointing.load(content, str(folder.of_step(step)))
        except Exception as error:  # of Megatron, torch or the file system
            detail = " ".join(str(error).split())[:500]
            raise SnipError(f"cannot read '{folder.of_step(step)}': {detail}") from error
        self._take(loaded)
        if same_layout:
            _set_random_streams(loaded)
        elif self._config.attention_dropout or self._config.hidden_dropout:
            self._warn("another layout than the checkpoint's: dropout starts new random streams")
        if self._config.save == self._config.load:
            self.saved = step
        return _progress(loaded, step)

    def _take(self, loaded: dict[str, Any]) -> None:
        """Put what was loaded in its place."""
        for name, chunk in self._chunks().items():
            chunk.load_state_dict(loaded[name])
        self._state.optimizer.load_state_dict(loaded["optimizer"])
        self._state.scheduler.load_state_dict(loaded["opt_param_scheduler"])

    def _template(self, run: SavedRun, loading: bool) -> dict[str, Any]:
        """Return the sharded state of model and optimizer, in the form that `run` wrote it."""
        metadata = {
            # What Megatron asks of its own checkpoints.
            "distrib_optim_sharding_type": (
                "fully_reshardable" if run.fully_reshardable else "dp_reshardable"
            ),
            "chained_optim_avoid_prefix": True,
            "singleton_local_shards": False,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        content: dict[str, Any] = {
            name: chunk.sharded_state_dict(metadata=metadata)
            for name, chunk in self._chunks().items()
        }
        content["optimizer"] = self._state.optimizer.sharded_state_dict(
            content, is_loading=loading, metadata=metadata
        )
        return content

    def _chunks(self) -> dict[str, Any]:
        """Return this rank's GPTModels by Megatron's names for them."""
        chunks = self._state.runner.model
        names = ["model"] if len(chunks) == 1 else [f"model{i}" for i in range(len(chunks))]
        return dict(zip(names, map(_unwrapped, chunks), strict=True))

    def _is_same_layout(self, saved: SavedRun) -> bool:
        config = self._config.model_dump(mode="json")
        same = not layout_changes(saved.config, config)
        return same and saved.world_size == dist.get_world_size()

    def _lead(self, what: str, action: Callable[[], Any]) -> None:
        """All ranks: let rank 0 act; all hear of a failure."""
        attempt(what, action if self._leader else lambda: None, self._group)

    def _warn(self, text: str) -> None:
        if self._leader:
            logger.warning(text)


def _unwrapped(chunk: Any) -> Any:
    """Return the GPTModel within DistributedDataParallel and Float16Module."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _plain(progress: Progress, state: TrainingState) -> dict[str, Any]:
    """Return what is the same on all ranks, as built-in types."""
    return {
        "iteration": progress.step,
        "validation": [progress.first_validation_loss, progress.validation_loss],
        "opt_param_scheduler": state.scheduler.state_dict(),
        "snip": None if progress.snip is None else progress.snip.to_dict(),
    }


def _progress(loaded: dict[str, Any], step: int) -> Progress:
    assert loaded["iteration"] == step, "a checkpoint lies in the folder of its step"
    first, last = loaded["validation"]
    snip = loaded["snip"]
    return Progress(step, first, last, None if snip is None else ControllerState.from_dict(snip))


def _random_streams() -> dict[str, Any]:
    """Return this rank's random streams, to be written, or to be read into."""
    rank = dist.get_rank()
    streams = {"cpu": torch.get_rng_state(), **get_cuda_rng_tracker().get_states()}
    if torch.cuda.is_available():
        streams["cuda"] = torch.cuda.get_rng_state()
    names = {name: f"random.{rank}.{name}" for name in streams}
    return {
        names[name]: ShardedTensor.from_rank_offsets(names[name], stream)
        for name, stream in streams.items()
    }


def _set_random_streams(loaded: dict[str, Any]) -> None:
    prefix = f"random.{dist.get_rank()}."
    streams = {k.removeprefix(prefix): v for k, v in loaded.items() if k.startswith(prefix)}
    torch.set_rng_state(streams.pop("cpu"))
    if "cuda" in streams:
        torch.cuda.set_rng_state(streams.pop("cuda"))
    get_cuda_rng_tracker().set_states(streams)

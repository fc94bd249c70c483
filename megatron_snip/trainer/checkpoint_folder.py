"""CheckpointFolder: where checkpoints lie, and which one is whole. Needs no torch.

    FOLDER/iter_0000040/                           a whole checkpoint, after 40 training steps
    FOLDER/iter_0000040/run.json                   the settings it was made with
    FOLDER/.iter_0000060.partial/                  one that is being written, or never was finished
    FOLDER/latest_checkpointed_iteration.txt       the step to go on from, written last

The names are Megatron's. A checkpoint is written under its partial name, put on disk, renamed, and
only then named by the pointer: a run that is killed at any moment leaves the pointer at a whole
checkpoint. Partial folders are removed by the next run that saves.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_snip.errors import UsageError
from megatron_snip.files import read_json, write_atomic

POINTER = "latest_checkpointed_iteration.txt"
SETTINGS = "run.json"
SCHEMA_VERSION = 1

MODEL_FIELDS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "num_experts",
    "moe_ffn_hidden_size",
    "vocab_size",
    "make_vocab_size_divisible_by",
    "untie_embeddings_and_output_weights",
    "rotary_base",
    "norm_epsilon",
    "bf16",
    "use_distributed_optimizer",
)
"""Settings that the tensors of a checkpoint depend on."""

ORDER_FIELDS = ("seed", "global_batch_size", "seq_length", "train_iters", "data_path", "split")
"""Settings that decide which samples a step sees."""


LAYOUT_FIELDS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
"""Settings that spread the model over ranks."""

_BEFORE_EXPERTS = {"expert_model_parallel_size": 1}
"""What holds of a checkpoint that says nothing of experts."""


@dataclass(frozen=True)
class SavedRun:
    """What a checkpoint tells of the run that made it.

    Attributes:
        config: its settings, plain types.
        world_size: its number of ranks.
    """

    config: dict[str, Any]
    world_size: int

    @property
    def fully_reshardable(self) -> bool:
        """Whether any layout can read its optimizer's state."""
        sharded = self.config.get("use_distributed_optimizer", False)
        return not sharded or bool(self.config.get("dist_ckpt_optim_fully_reshardable", False))


@dataclass(frozen=True)
class CheckpointFolder:
    """A folder of checkpoints.

    Attributes:
        path: need not exist.
    """

    path: Path

    def of_step(self, step: int) -> Path:
        """Return where the checkpoint after `step` training steps lies."""
        return self.path / f"iter_{step:07d}"

    def partial(self, step: int) -> Path:
        """Return where it is written."""
        return self.path / f".iter_{step:07d}.partial"

    def latest(self) -> int | None:
        """Return the step that the pointer names, or None without one.

        Raises:
            UsageError: if the pointer cannot be read, or names no whole checkpoint of ours.
        """
        pointer = self.path / POINTER
        if not pointer.exists():
            return None
        try:
            text = pointer.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read '{pointer}': {error}") from None
        if not text.isdecimal() or len(text) > 18:
            raise UsageError(f"'{pointer}' must hold a number of steps, got '{text[:40]}'")
        self.check_whole(int(text))
        return int(text)

    def check_whole(self, step: int) -> None:
        """Refuse a checkpoint that is not there.

        Raises:
            UsageError: names what is missing.
        """
        folder = self.of_step(step)
        # Both come last: Megatron's own record of the format, and ours.
        for name in ("metadata.json", SETTINGS):
            if not (folder / name).is_file():
                raise UsageError(
                    f"'{folder}' is not a whole checkpoint of this trainer: no '{name}' in it"
                )

    def begin(self, step: int) -> Path:
        """Make an empty partial folder, removing others that were never finished; return it."""
        self.path.mkdir(parents=True, exist_ok=True)
        for stale in self.path.glob(".iter_*.partial"):
            shutil.rmtree(stale)
        folder = self.partial(step)
        folder.mkdir()
        return folder

    def finish(self, step: int, run: SavedRun) -> Path:
        """Turn a written partial folder into the checkpoint that the pointer names; return it.

        Args:
            step: training steps done.
            run: what it tells of this run.
        """
        partial, folder = self.partial(step), self.of_step(step)
        content = {"version": SCHEMA_VERSION, "step": step, "world_size": run.world_size}
        text = json.dumps({**content, "config": run.config}, indent=1)
        write_atomic(partial / SETTINGS, text + "\n")
        replaced = self.path / f".iter_{step:07d}.replaced.partial"
        if folder.exists():  # of a run that this one went back before
            os.rename(folder, replaced)
        os.rename(partial, folder)
        # Its fsync of the folder makes the rename durable as well.
        write_atomic(self.path / POINTER, f"{step}\n")
        shutil.rmtree(replaced, ignore_errors=True)
        return folder

    def saved_run(self, step: int) -> SavedRun:
        """Return what a checkpoint tells of its run.

        Raises:
            UsageError: if it cannot be read or is of another version.
        """
        path = self.of_step(step) / SETTINGS
        value = read_json(path, "checkpoint settings")
        version = value.get("version") if isinstance(value, dict) else None
        if version != SCHEMA_VERSION:
            raise UsageError(
                f"checkpoint settings '{path}': version {version!r}; this megatron-snip reads "
                f"version {SCHEMA_VERSION}"
            )
        try:
            return SavedRun(dict(value["config"]), int(value["world_size"]))
        except (KeyError, TypeError, ValueError) as error:
            detail = f"{type(error).__name__}: {error}"
            raise UsageError(f"checkpoint settings '{path}' are damaged ({detail})") from None


def check_loadable(saved: SavedRun, config: dict[str, Any], source: Path) -> None:
    """Refuse to load another model's weights, or an optimizer's state from another layout.

    Args:
        saved: what the checkpoint tells of its run.
        config: this run's settings, plain types.
        source: the checkpoint, for messages.

    Raises:
        UsageError: names the first setting that differs.
    """
    changes = _changes(MODEL_FIELDS, saved.config, config)
    if changes:
        raise UsageError(f"load: '{source}' is of another model: {changes[0]}")
    _check_experts(saved.config, config, source)
    changes = layout_changes(saved.config, config)
    if changes and not saved.fully_reshardable:
        raise UsageError(
            f"load: '{source}' holds a distributed optimizer of another layout ({changes[0]}); "
            "use that layout, or save with dist_ckpt_optim_fully_reshardable"
        )


def _check_experts(saved: dict[str, Any], config: dict[str, Any], source: Path) -> None:
    """Megatron gives experts that are dealt out an optimizer of their own, and cannot convert."""
    name = "expert_model_parallel_size"
    before, now = saved.get(name, 1), config.get(name, 1)
    if (before > 1) != (now > 1):
        raise UsageError(
            f"load: '{source}' has {name} {before}, not {now}: Megatron cannot convert the "
            "optimizer between experts on every rank and experts dealt out to ranks"
        )


def layout_changes(saved: dict[str, Any], config: dict[str, Any]) -> tuple[str, ...]:
    """Return the settings that spread the model and differ, as `name old -> new`."""
    return _changes(LAYOUT_FIELDS, saved, config)


def order_changes(saved: dict[str, Any], config: dict[str, Any]) -> tuple[str, ...]:
    """Return the settings that decide the order of samples and differ, as `name old -> new`."""
    return _changes(ORDER_FIELDS, saved, config)


def _changes(
    fields: tuple[str, ...], saved: dict[str, Any], config: dict[str, Any]
) -> tuple[str, ...]:
    before = {**_BEFORE_EXPERTS, **saved}
    return tuple(
        f"{field} {before.get(field)} -> {config.get(field)}"
        for field in fields
        if before.get(field) != config.get(field)
    )

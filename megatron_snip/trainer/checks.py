"""Everything about a run that can be wrong before it starts, checked without torch or ranks.

Each check raises a `UsageError` of one line. Nothing is written.
"""

from __future__ import annotations

import logging
import os
import struct
from pathlib import Path

import numpy as np

from megatron_snip.config import SnipConfig
from megatron_snip.directory import check_new_run
from megatron_snip.errors import InfeasiblePlanError, UsageError
from megatron_snip.log import warn_once
from megatron_snip.planning.plan import read_plan
from megatron_snip.planning.problem import LinearChoices, OptionCost, PlanningProblem
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.trainer.checkpoint_folder import (
    CheckpointFolder,
    check_loadable,
    order_changes,
)
from megatron_snip.trainer.config import TrainConfig
from megatron_snip.trainer.sizes import check_ranks, linear_shapes, tile_warnings

logger = logging.getLogger(__name__)

TOKENS_LOOKED_AT = 1_000_000
"""Tokens of the data whose ids are compared with vocab_size."""
_INDEX_HEADER = b"MMIDIDX\x00\x00"
_INDEX_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


def check_run(config: TrainConfig, world_size: int) -> None:
    """Refuse a run that cannot work; warn of what will work less well.

    Args:
        config: the run's settings.
        world_size: number of ranks it will have.

    Raises:
        UsageError: one line that names what is wrong and what to do.
    """
    check_ranks(config, world_size)
    check_checkpoints(config)
    check_run_dir(config)
    if config.data_path is not None:
        check_data(config.data_path, config.vocab_size)
    if config.snip.enabled:
        check_plan(config)
        for warning in tile_warnings(config):
            warn_once(logger, warning)


def check_run_dir(config: TrainConfig) -> None:
    """Refuse a run directory that cannot be written or holds files that must stay.

    Raises:
        UsageError: names what is in the way.
    """
    run_dir = config.run_dir
    if not run_dir.exists():
        _check_can_be_made("run_dir", run_dir)
        return
    if not run_dir.is_dir():
        raise UsageError(f"run_dir '{run_dir}' is a file; name a folder")
    if not os.access(run_dir, os.R_OK | os.W_OK | os.X_OK):
        raise UsageError(f"run_dir '{run_dir}' cannot be read and written; name another folder")
    # A command that starts or resumes moves the files of an attempt without a checkpoint aside.
    may_start_again = config.load is not None and config.load == config.save
    check_new_run(run_dir, config.overwrite or resume_step(config) > 0 or may_start_again)


def _check_can_be_made(name: str, folder: Path) -> None:
    parent = next(p for p in folder.absolute().parents if p.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"{name} '{folder}' cannot be made in '{parent}'; name another")


def check_checkpoints(config: TrainConfig) -> None:
    """Refuse folders of checkpoints that this run cannot go on from, or must not write to.

    Raises:
        UsageError: names the setting and the folder.
    """
    for name, needed in (
        ("save_interval", "save"),
        ("ckpt_step", "load"),
    ):
        if getattr(config, name) and getattr(config, needed) is None:
            raise UsageError(f"{name} needs {needed}, a folder of checkpoints")
    step = resume_step(config)
    if step:
        _check_resume(config, step)
    if config.save is None:
        return
    if not config.save.exists():
        _check_can_be_made("save", config.save)
    elif not config.save.is_dir() or not os.access(config.save, os.W_OK | os.X_OK):
        raise UsageError(f"save '{config.save}' is not a folder that can be written; name another")
    latest = CheckpointFolder(config.save).latest()
    if latest is not None and config.save != config.load:
        raise UsageError(
            f"save '{config.save}' holds checkpoints of another run, up to step {latest}; go on "
            f"from them (--load {config.save}) or name another folder"
        )


def resume_step(config: TrainConfig) -> int:
    """Return how many training steps the run goes on after; 0 for a fresh start.

    Raises:
        UsageError: if the checkpoint that is asked for is not there.
    """
    if config.load is None:
        return 0
    folder = CheckpointFolder(config.load)
    if config.ckpt_step is not None:
        folder.check_whole(config.ckpt_step)
        return config.ckpt_step
    latest = folder.latest()
    if latest is None and config.load != config.save:
        raise UsageError(
            f"load '{config.load}' holds no checkpoint; name the folder that --save wrote to, or "
            "drop --load to start a new run"
        )
    return latest or 0


def _check_resume(config: TrainConfig, step: int) -> None:
    assert config.load is not None
    folder = CheckpointFolder(config.load)
    saved, now = folder.saved_run(step), config.model_dump(mode="json")
    check_loadable(saved, now, folder.of_step(step))
    changes = order_changes(saved.config, now)
    if changes:
        warn_once(
            logger,
            f"load: the samples of a step are others than the checkpoint's run would see "
            f"({', '.join(changes)})",
        )


def check_data(prefix: Path, vocab_size: int | None) -> None:
    """Refuse data that are missing, are not in Megatron's indexed format, or hold larger ids.

    Raises:
        UsageError: names the file.
    """
    if vocab_size is None:
        raise UsageError("data_path needs vocab_size, the number of token ids in the data")
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for path in (index, data):
        if not path.is_file():
            raise UsageError(f"data_path: '{path}' does not exist (give the path without .bin)")
    try:
        with index.open("rb") as stream:
            header = stream.read(len(_INDEX_HEADER) + 9)
        if not header.startswith(_INDEX_HEADER) or len(header) < len(_INDEX_HEADER) + 9:
            raise UsageError(f"data_path: '{index}' is not in Megatron's indexed format")
        _, code = struct.unpack("<QB", header[len(_INDEX_HEADER) :])
        if code not in _INDEX_DTYPES:
            raise UsageError(f"data_path: '{index}' holds no integers (type code {code})")
        tokens = np.fromfile(data, dtype=_INDEX_DTYPES[code], count=TOKENS_LOOKED_AT)
    except OSError as error:
        raise UsageError(f"data_path: cannot read '{prefix}': {error.strerror}") from None
    if tokens.size == 0:
        raise UsageError(f"data_path: '{data}' is empty")
    if int(tokens.max()) >= vocab_size:
        raise UsageError(
            f"data_path: '{data}' holds token id {int(tokens.max())}, vocab_size is {vocab_size}"
        )


def check_plan(config: TrainConfig) -> None:
    """Refuse SNIP settings that no plan for this model can meet.

    Raises:
        UsageError: unknown policy; pins that match nothing; a plan file that does not fit; an
            efficiency target out of reach, with the best one that is not.
    """
    # The solver's package takes a second to import, which --help need not wait for.
    from megatron_snip.planning.planner import make_plan
    from megatron_snip.planning.policies import get_policy

    snip = config.snip
    shapes = linear_shapes(config)
    get_policy(snip.policy)
    if snip.plan_file is not None:
        read_plan(snip.plan_file).check_against([linear.name for linear in shapes])
    settings = PlanSettings.from_config(snip)
    if get_policy(snip.policy).heeds_target:
        # Any policy that heeds the target tells whether it can be met; this one needs no solver.
        settings = settings.model_copy(update={"policy": "greedy"})
    try:
        make_plan(_problem(config, snip), settings)
    except InfeasiblePlanError as error:
        raise UsageError(f"snip: {error}") from None


def _problem(config: TrainConfig, snip: SnipConfig) -> PlanningProblem:
    """Return the planner's problem with every quality loss zero."""
    options = {
        str(option): OptionCost(quality_loss=0.0, saving=option.share_in(snip.lowest_format))
        for option in snip.options
    }
    linears = tuple(
        LinearChoices(
            name=linear.name, stage=linear.stage, flops=linear.flops_per_token, options=options
        )
        for linear in linear_shapes(config)
    )
    return PlanningProblem(linears=linears, target=snip.efficiency_target)

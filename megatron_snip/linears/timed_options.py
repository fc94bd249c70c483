"""The options of a run with their seconds, for `--snip-cost time`.

Rank 0 reads the table of `--snip-calibration`, or measures every distinct shape of the model once
(calibrate.py).
"""

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_snip.config import AUTO, SnipConfig
from megatron_snip.errors import UnsupportedError, UsageError, naming_field
from megatron_snip.files import write_atomic
from megatron_snip.linears.availability import AvailableOptions
from megatron_snip.linears.calibrate import TimedShape, measure, this_setup
from megatron_snip.linears.model import PlannedModel
from megatron_snip.linears.snapshot import TrainingStateSnapshot
from megatron_snip.linears.te.machine import Machine
from megatron_snip.options import BF16, Option
from megatron_snip.planning.calibration import CalibrationTable, read_calibration
from megatron_snip.types import split_linear_name

logger = logging.getLogger(__name__)

AUTO_BUDGET_S = 0.05
"""Seconds that `auto` spends on each time that it reports."""

AUTO_LIMIT_S = 120.0
"""Most seconds that `auto` takes for all shapes."""


def timed_options(
    available: AvailableOptions, model: PlannedModel, config: SnipConfig, cache: Path | None
) -> AvailableOptions:
    """All ranks: return the options with their seconds, for --snip-cost time.

    No linear gets an option that is not faster than BF16, or that `auto` could not measure, unless
    it is fixed to it.

    Args:
        available: what the linears can run, and what is fixed.
        model: the planned linears.
        config: the run's settings.
        cache: file of rank 0 for the table of `auto`; it is read again if shapes, device and
            versions are the same. None writes no file.

    Raises:
        RemoteFailure: on every rank, if the table cannot be measured.
        UsageError: on every rank, if the table is bad or lacks a linear or format, or if `auto`
            finds microbatches of several lengths.
        UnsupportedError: on every rank, if nothing is faster than BF16 (as in simulation).
    """
    fixed_options = (each.option for each in available.fixed.values())
    options = tuple(dict.fromkeys((*available.options, *fixed_options)))
    make: Callable[[], CalibrationTable]
    if isinstance(config.calibration, Path):
        make = partial(read_calibration, config.calibration)
    else:
        if model.job.backend == "simulate":
            raise UnsupportedError(
                "--snip-cost time: simulated formats are never faster than bf16; give the seconds "
                "of another machine (--snip-calibration FILE), or use --snip-cost flops"
            )
        make = partial(_cached, cache, _shapes(model, options), model.job.machine)
    control = model.runtime.topology.control
    with naming_field("calibration"):
        made = control.on_rank_0("--snip-calibration", lambda: make().model_dump())
    table = CalibrationTable(**made)
    refusals = dict(available.refusals)
    largest_saving_s = 0.0
    for option in available.options:
        refused = dict(available.refusals.get(option, {}))
        for linear in model.job.linears:
            name = linear.name
            if name in refused:
                continue
            fixed = available.fixed.get(name)
            is_fixed = fixed is not None and fixed.option == option
            if config.calibration == AUTO and not is_fixed and not table.has(name, option):
                refused[name] = "its seconds could not be measured"
                continue
            saving_s = table.seconds(name, 1.0, BF16) - table.seconds(name, 1.0, option)
            largest_saving_s = max(largest_saving_s, saving_s)
            if saving_s <= 0.0 and option != BF16 and not is_fixed:
                refused[name] = "it is not faster than bf16"
        refusals[option] = refused
    if not largest_saving_s:
        raise UnsupportedError(
            f"--snip-cost time: no linear is faster than in bf16 in any of --snip-formats on "
            f"{table.device}; use --snip-cost flops"
        )
    return replace(available, refusals=refusals, calibration=table)


def _shapes(model: PlannedModel, options: Sequence[Option]) -> dict[str, TimedShape]:
    """All ranks: return the shapes to measure, by glob of linears' names."""
    config = model.config
    tokens = model.microbatch_tokens
    if tokens is None:
        raise UsageError("auto needs microbatches of one length; give a file", "calibration")
    tokens //= int(config.context_parallel_size)
    uniform = (Option.uniform(name) for option in options for name in option.formats)
    wanted = dict.fromkeys((BF16, *uniform, *options))
    own = []
    for linear in model.linears:
        num_tokens = tokens
        if linear.placements[0].expert is not None:
            num_tokens = _expert_tokens(tokens, config)
        norm = getattr(linear.module, "normalization", "")
        runs = [str(option) for option in wanted if linear.refusal(option) is None]
        own.append([linear.name, *linear.weights[0].shape, num_tokens, norm, ",".join(runs)])
    shapes: dict[str, TimedShape] = {}
    control = model.runtime.topology.control
    for rank in control.gather("reading the linears' shapes", lambda: own).values:
        for name, *values in rank:
            shape = TimedShape(*values)
            _, _, module = split_linear_name(name)
            # The glob has the shape of the first layer; a layer that differs is named.
            if shapes.setdefault(f"*.layers.*.{module}", shape) != shape:
                shapes[name] = shape
    return dict(sorted(shapes.items(), key=lambda pair: -len(pair[0])))  # a name before its glob


def _expert_tokens(tokens: int, config: Any) -> int:
    """Return an expert's share of its group's tokens, padded to complete tiles of 128.

    Args:
        tokens: tokens of a microbatch on this context-parallel rank.
        config: Megatron's TransformerConfig.
    """
    num_ranks = config.expert_model_parallel_size * config.expert_tensor_parallel_size
    routed = tokens * num_ranks * config.moe_router_topk // config.tensor_model_parallel_size
    return int(-(-routed // config.num_moe_experts // 128) * 128)


def _cached(
    cache: Path | None, shapes: Mapping[str, TimedShape], machine: Machine
) -> CalibrationTable:
    """Return the cached table if it is of these shapes, device and versions; else measure."""
    digest = hashlib.sha256(json.dumps(shapes).encode()).hexdigest()
    device = torch.device("cuda")
    here = this_setup(device, shapes=digest)
    if cache is not None and cache.is_file():
        with contextlib.suppress(UsageError):  # a damaged table is measured again
            table = read_calibration(cache)
            there = table.model_dump(include=set(here))
            if {**there, "date": here["date"]} == here:  # all but the date
                return table
    state = TrainingStateSnapshot(())  # the random number generators: measuring draws numbers
    found = {}
    end = time.perf_counter() + AUTO_LIMIT_S
    left = list(dict.fromkeys(shapes.values()))
    logger.info(
        "snip: measuring the seconds of %d shapes of linears, for %g s at most",
        len(left),
        AUTO_LIMIT_S,
    )
    while left:
        shape = left[0]
        limit_s = (end - time.perf_counter()) / len(left)
        found[shape] = measure(shape, machine, device, AUTO_BUDGET_S, limit_s)
        del left[0]
    state.restore()
    logger.info("snip: measured the seconds of %d shapes of linears", len(found))
    linears = []
    for glob, shape in shapes.items():
        measured = found[shape]
        for line in measured.problems():
            logger.warning("snip: %s, %d x %d: %s", glob, *shape[:2], line)
        # Savings count from BF16. No table is written, so the next start measures again.
        if measured.linear is None or str(BF16) in measured.refused:
            why = measured.refused.get(str(BF16), "no option could be measured")
            raise UsageError(
                f"the seconds of '{glob}' in bf16 could not be measured: {why}. Start again when "
                "nothing else runs there, give a table of 'megatron-snip calibrate', or use "
                "--snip-cost flops",
                "calibration",
            )
        linears.append(measured.linear.model_copy(update={"names": glob}))
    table = CalibrationTable(**here, tokens=1, linears=tuple(linears))
    if cache is not None:
        write_atomic(cache, table.model_dump_json(indent=1) + "\n")
    return table

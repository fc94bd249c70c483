"""Seconds of a linear's GEMMs on this machine, simulated or under Transformer Engine.

For `--snip-cost time`, `timed_options` reads the table of `--snip-calibration` on rank 0, or
measures every distinct shape of the model once. A linear is timed forward and backward (the least
of several runs), with quantization (and a fused norm of Transformer Engine) and without
communication:

    fprop = forward       dgrad = with dX - forward       wgrad = with dX and dW - with dX

The first two are timed with a frozen weight: its forward quantizes X for fprop alone, and not for
wgrad as well.

What an option with several formats takes beside its GEMMs (`mixed_s`) is measured too: the median
of its time less its GEMMs' times, over the options that the linear can run.
"""

import hashlib
import importlib
import json
import logging
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_snip.collectives import gather_json, on_rank_0
from megatron_snip.config import AUTO, SnipConfig
from megatron_snip.errors import UnsupportedError, UsageError, naming_field
from megatron_snip.files import write_atomic
from megatron_snip.formats import is_delayed
from megatron_snip.linears.availability import AvailableOptions
from megatron_snip.linears.model import PlannedModel
from megatron_snip.linears.quantized_linear import LinearCall, quantized_linear
from megatron_snip.linears.snapshot import TrainingStateSnapshot
from megatron_snip.linears.te.linear import quant_params
from megatron_snip.linears.te.machine import Machine, te_recipe
from megatron_snip.linears.te.modules import EXTENSION
from megatron_snip.linears.te.quantizers import built_in_recipe
from megatron_snip.options import BF16, Option
from megatron_snip.planning.calibration import (
    CalibratedLinear,
    CalibrationTable,
    read_calibration,
)
from megatron_snip.quantizers.reference import amax_of
from megatron_snip.quantizers.stochastic import StochasticStream, StreamKey
from megatron_snip.types import Gemm, Operand, split_linear_name
from megatron_snip.version import PACKAGES, installed_version

logger = logging.getLogger(__name__)

MAX_RUNS = 200
"""Largest number of runs of a linear; slow linears stop earlier, at the limit of seconds."""

AUTO_BUDGET_S = 0.05
"""Seconds that `auto` spends on each time that it reports."""


class TimedShape(NamedTuple):
    """A linear's size, norm and options: what is measured once for all linears that share them.

    Attributes:
        out_features: output features of the shard.
        in_features: input features of the shard.
        tokens: tokens that a GEMM multiplies.
        norm: kind of the fused norm (`RMSNorm`, `LayerNorm`), or an empty text.
        options: the options that the linear can run, comma separated; with a mixed option, the
            uniform ones of its formats too.
    """

    out_features: int
    in_features: int
    tokens: int
    norm: str
    options: str


TimedLinear = tuple[Callable[[], Tensor], Tensor]
"""A linear's forward on some input, and its weight."""


def timed_options(
    available: AvailableOptions, model: PlannedModel, config: SnipConfig, cache: Path | None
) -> AvailableOptions:
    """All ranks: return the options with their seconds, for --snip-cost time.

    No linear gets an option that is not faster than BF16, unless it is fixed to it.

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
    make: Callable[[], CalibrationTable] = partial(read_calibration, config.calibration)
    fixed_options = (each.option for each in available.fixed.values())
    options = tuple(dict.fromkeys((*available.options, *fixed_options)))
    if config.calibration == Path(AUTO):
        if model.backend == "simulate":
            raise UnsupportedError(
                "--snip-cost time: simulated formats are never faster than bf16; give the seconds "
                "of another machine (--snip-calibration FILE), or use --snip-cost flops"
            )
        make = partial(_cached, cache, _shapes(model, options), model.machine)
    control = model.runtime.topology.control
    with naming_field("calibration"):
        made = on_rank_0("--snip-calibration", lambda: make().model_dump(), control)
    table = CalibrationTable(**made)
    refusals = dict(available.refusals)
    largest_saving_s = 0.0
    for option in available.options:
        refused = dict(available.refusals.get(option, {}))
        for linear in model.all_linears:
            name = linear.name
            if name in refused:
                continue
            saving_s = table.seconds(name, 1.0, BF16) - table.seconds(name, 1.0, option)
            largest_saving_s = max(largest_saving_s, saving_s)
            fixed = available.fixed.get(name)
            is_fixed = fixed is not None and fixed.option == option
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
    for rank in gather_json(own, model.runtime.topology.control):
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
        table = read_calibration(cache)
        there = table.model_dump(include=set(here))
        if {**there, "date": here["date"]} == here:  # all but the date
            return table
    state = TrainingStateSnapshot(())  # the random number generators: measuring draws numbers
    found = {s: measure(s, machine, device, AUTO_BUDGET_S) for s in set(shapes.values())}
    state.restore()
    logger.info("snip: measured the seconds of %d shapes of linears", len(found))
    linears = [found[shape].model_copy(update={"names": glob}) for glob, shape in shapes.items()]
    table = CalibrationTable(**here, tokens=1, linears=tuple(linears))
    if cache is not None:
        write_atomic(cache, table.model_dump_json(indent=1) + "\n")
    return table


def this_setup(device: torch.device, **versions: str) -> dict[str, Any]:
    """Return a table's machine, device, date and versions: those installed and `versions`."""
    return {
        "machine": f"{platform.node()} ({platform.machine()})",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "versions": {name: str(installed_version(name)) for name in PACKAGES} | versions,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def measure(
    shape: TimedShape, machine: Machine | None, device: torch.device, budget_s: float
) -> CalibratedLinear:
    """Time a linear under every option of a shape; see the file's description.

    Args:
        shape: what to measure.
        machine: gives the recipes of Transformer Engine; None simulates.
        device: where to run.
        budget_s: seconds to spend on each time.

    Raises:
        RuntimeError: if memory is short.
    """
    x = torch.randn(shape.tokens, shape.in_features).bfloat16().to(device).requires_grad_()
    g = torch.randn(shape.tokens, shape.out_features).bfloat16().to(device)

    def gemm_times(option: Option) -> tuple[float, float, float]:
        """Return the seconds of fprop, dgrad and wgrad."""
        make = simulated_linear if machine is None else partial(te_linear, machine)
        forward, weight = make(shape, option, x)

        def both() -> None:
            inputs = [x, weight] if weight.requires_grad else [x]
            torch.autograd.grad(forward(), inputs, g)

        total = least_s(both, device, budget_s)
        weight.requires_grad_(False)
        fprop = least_s(forward, device, budget_s)
        with_dgrad = least_s(both, device, budget_s)
        return fprop, with_dgrad - fprop, total - with_dgrad

    seconds: dict[str, dict[str, float]] = {}
    mixed = [0.0]
    options = map(Option.parse, shape.options.split(","))
    # Uniform options first: a mixed one is compared with them.
    for option in sorted(options, key=lambda one: len(set(one.formats))):
        parts = gemm_times(option)
        if len(set(option.formats)) == 1:
            gemms = zip(Gemm, parts, strict=True)
            seconds[option.fprop] = {gemm.value: max(part, 1e-9) for gemm, part in gemms}
        else:
            of_gemms = sum(seconds[option[gemm]][gemm.value] for gemm in Gemm)
            mixed.append(sum(parts) - of_gemms)
    return CalibratedLinear(
        names="*",
        out_features=shape.out_features,
        in_features=shape.in_features,
        seconds=seconds,
        tokens=shape.tokens,
        mixed_s=max(0.0, statistics.median(mixed[1:] or mixed)),
    )


def te_linear(machine: Machine, shape: TimedShape, option: Option, x: Tensor) -> TimedLinear:
    """Return a linear of Transformer Engine, with its norm if it has one."""
    te: Any = importlib.import_module("transformer_engine.pytorch")
    extension: Any = importlib.import_module(EXTENSION)
    fused = {"normalization": shape.norm} if shape.norm else {}
    make = te.LayerNormLinear if shape.norm else te.Linear
    linear = make(shape.in_features, shape.out_features, bias=False, params_dtype=x.dtype, **fused)
    recipe = te_recipe(option, machine)
    params = quant_params(recipe)
    # Megatron opens the autocast of the run's own recipe around each layer.
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    if recipe.follows_the_run:
        around = partial(te.fp8_autocast, enabled=True, fp8_recipe=built_in_recipe(recipe.fprop))

    def forward() -> Tensor:
        with around(), extension._get_fp8_autocast_for_quant_params(params, True):
            y: Tensor = linear(x)
        return y

    return forward, linear.weight


def simulated_linear(shape: TimedShape, option: Option, x: Tensor) -> TimedLinear:
    """Return a linear with simulated GEMMs."""
    weight = torch.randn(shape.out_features, shape.in_features).to(x).requires_grad_()
    stream = StochasticStream(StreamKey(seed=0, linear="", iteration=0, microbatch=0))

    def delayed_scale(_: Operand, tensor: Tensor) -> Tensor:
        return amax_of(tensor)  # which a linear notes; any scale takes as long

    scale = delayed_scale if is_delayed(option.fprop) else None
    call = LinearCall(option, lambda: stream, delayed_scale=scale)
    return partial(quantized_linear, x, weight, None, call), weight


def least_s(call: Callable[[], object], device: torch.device, budget_s: float) -> float:
    """Return the least time of a call: other work on the machine only adds to it."""

    def timed() -> float:
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    timed()  # compiles and warms up
    runs = max(3, min(MAX_RUNS, int(budget_s / max(timed(), 1e-9))))
    return min(timed() for _ in range(runs))

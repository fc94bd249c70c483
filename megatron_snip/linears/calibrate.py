"""Seconds of a linear's GEMMs on this machine, simulated or under Transformer Engine.

`timed_options` is time as the objective of a run: rank 0 reads the table of `--snip-calibration`,
or measures every distinct shape of the model once. A linear of Transformer Engine is timed forward
and backward, quantization (and a fused norm) included, without communication:

    fprop = forward       dgrad = with dX - forward       wgrad = with dX and dW - with dX

What an option with several formats takes beside its GEMMs (`mixed_s`) is measured too: the median
of its time less its GEMMs' times, over the options that the linear can run.
"""

from __future__ import annotations

import importlib
import logging
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_snip.collectives import broadcast_json, gather_json, one_line
from megatron_snip.config import AUTO, SnipConfig
from megatron_snip.errors import UnsupportedError, UsageError, naming_field
from megatron_snip.files import write_atomic
from megatron_snip.linears import simulated_gemm
from megatron_snip.linears.availability import AvailableOptions, Machine, te_recipe
from megatron_snip.linears.model import PlannedModel
from megatron_snip.linears.te.linear import quant_params
from megatron_snip.linears.te.modules import EXTENSION
from megatron_snip.options import BF16, Option
from megatron_snip.planning.calibration import (
    CalibratedLinear,
    CalibrationTable,
    read_calibration,
)
from megatron_snip.quantizers import StochasticStream, StreamKey
from megatron_snip.types import Gemm, glob_matches, split_linear_name
from megatron_snip.version import installed_version

logger = logging.getLogger(__name__)

MAX_RUNS = 200
"""Most times a GEMM is run; fast ones stop here, slow ones when their seconds are spent."""

AUTO_BUDGET_S = 0.05
"""Seconds that `auto` spends on each time that it measures."""


class Shape(NamedTuple):
    """What is measured once for all linears that have it.

    Attributes:
        rows: out_features of the shard.
        columns: in_features of the shard.
        tokens: of a microbatch, as the GEMM gets them.
        norm: kind of the fused norm; empty without one.
        options: what the linear can run, BF16 included.
    """

    rows: int
    columns: int
    tokens: int
    norm: str
    options: tuple[str, ...]


def timed_options(
    available: AvailableOptions, model: PlannedModel, config: SnipConfig, cache: Path | None
) -> AvailableOptions:
    """All ranks: return the options with their seconds, for --snip-cost time.

    A linear is refused what is not faster than BF16, unless a pin demands it.

    Args:
        available: what the linears can run.
        model: the planned linears.
        config: the run's settings.
        cache: where `auto` keeps its table, on rank 0; it is used again for the same shapes,
            device and versions.

    Raises:
        UsageError: on every rank, if the table is bad or lacks a linear or format.
        UnsupportedError: on every rank, if nothing is faster than BF16 or cannot be measured.
    """
    control = model.runtime.topology.control
    if config.calibration != Path(AUTO):
        make = lambda: read_calibration(config.calibration)  # noqa: E731
    elif model.backend == "simulate":
        raise UnsupportedError(
            "--snip-cost time: simulated formats are never faster than bf16; give the seconds of "
            "another machine (--snip-calibration FILE), or use --snip-cost flops"
        )
    else:
        shapes = _shapes(model, available.options)
        make = lambda: _cached(cache, shapes, model.machine)  # noqa: E731
    found = broadcast_json(_outcome(make) if model.runtime.topology.rank == 0 else None, control)
    if "error" in found:
        raise UsageError(found["error"], "calibration")
    table = CalibrationTable(**found)
    refusals, names = dict(available.refusals), [i.name for i in model.all_linears]
    num_faster = 0
    with naming_field("calibration"):
        for option in available.options:
            runs = [n for n in names if option != BF16 and n not in refusals.get(option, {})]
            slow = dict.fromkeys(table.not_faster(runs, option), "it is not faster than bf16")
            num_faster += len(runs) - len(slow)
            pinned = [glob for glob, wanted in config.pin_pairs if wanted == option]
            slow = {n: w for n, w in slow.items() if not any(glob_matches(n, g) for g in pinned)}
            refusals[option] = {**slow, **refusals.get(option, {})}
    if not num_faster:
        formats = ", ".join(f for f in config.named_formats if f != "bf16")
        raise UnsupportedError(
            f"--snip-cost time: no linear is faster in {formats} than in bf16 ({table.device}); "
            "use --snip-cost flops"
        )
    return replace(available, refusals=refusals, calibration=table)


def _outcome(make: Callable[[], CalibrationTable]) -> dict[str, Any]:
    try:
        return make().model_dump(mode="json")
    except UsageError as error:
        return {"error": error.message}
    except Exception as error:  # whatever it was, all ranks get it
        return {"error": f"measuring failed: {type(error).__name__}: {one_line(error)}"}


def _shapes(model: PlannedModel, options: Sequence[Option]) -> dict[str, Shape]:
    """All ranks: return the shapes to measure, by glob of linears' names."""
    config, tokens = model.config, model.runtime.microbatch_tokens
    if tokens is None:
        raise UsageError(
            "auto needs microbatches of one length; give a file of megatron-snip calibrate",
            "calibration",
        )
    tokens //= int(config.context_parallel_size)
    uniform = (Option.uniform(name) for option in options for name in option.formats)
    wanted = dict.fromkeys((BF16, *uniform, *options))
    own = []
    for linear in model.linears:
        rows, columns = linear.weights[0].shape
        seen, norm = tokens, ""
        if hasattr(linear.module, "layer_norm_weight"):
            norm = str(linear.module.normalization)
        if linear.placements[0].expert is not None:  # its share of its group's tokens, padded
            ranks = config.expert_model_parallel_size * config.expert_tensor_parallel_size
            seen = tokens * ranks * config.moe_router_topk // config.tensor_model_parallel_size
            seen = -(-seen // config.num_moe_experts // 128) * 128
        runs = [str(o) for o in wanted if linear.refusal(o) is None]
        own.append([linear.name, rows, columns, seen, norm, runs])
    by_name = {
        name: Shape(*sizes, tuple(runs))
        for rank in gather_json(own, model.runtime.topology.control)
        for name, *sizes, runs in rank
    }
    kinds: dict[str, set[Shape]] = {}
    for name, shape in by_name.items():
        kinds.setdefault(split_linear_name(name)[2], set()).add(shape)
    globs: dict[str, Shape] = {}
    for name, shape in by_name.items():
        kind = split_linear_name(name)[2]
        globs[f"*.layers.*.{kind}" if len(kinds[kind]) == 1 else name] = shape
    return {glob: globs[glob] for glob in sorted(globs, key=len, reverse=True)}  # the first wins


def _cached(cache: Path | None, shapes: Mapping[str, Shape], machine: Machine) -> CalibrationTable:
    """Return the cached table if it is of these shapes, device and versions; else measure."""
    packages = ("megatron-snip", "megatron-core", "torch", "transformer-engine")
    versions = {name: str(installed_version(name)) for name in packages}
    device, keys = torch.cuda.get_device_name(), {g: _key(s) for g, s in shapes.items()}
    if cache is not None and cache.is_file():
        table = read_calibration(cache)
        known = {
            e.names: (e.out_features, e.in_features, e.tokens, set(e.seconds))
            for e in table.linears
        }
        if (table.device, table.versions, known) == (device, versions, keys):
            logger.info("snip: seconds are those of '%s'", cache)
            return table
    start = time.perf_counter()
    with torch.random.fork_rng(devices=[torch.cuda.current_device()]):
        measured = {shape: _measure_te(shape, machine) for shape in set(shapes.values())}
    logger.info(
        "snip: measured %d shapes of linears in %.1f s", len(measured), time.perf_counter() - start
    )
    table = CalibrationTable(
        machine=f"{platform.node()} ({platform.machine()})",
        device=device,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=versions,
        tokens=max(shape.tokens for shape in measured),
        linears=tuple(measured[s].model_copy(update={"names": g}) for g, s in shapes.items()),
    )
    if cache is not None:
        write_atomic(cache, table.model_dump_json(indent=1) + "\n")
    return table


def _key(shape: Shape) -> tuple[int, int, int, set[str]]:
    formats = {name for option in shape.options for name in Option.parse(option).formats}
    return shape.rows, shape.columns, shape.tokens, formats


def _measure_te(shape: Shape, machine: Machine) -> CalibratedLinear:
    """Time a linear of Transformer Engine under every option; see the module's description."""
    te: Any = importlib.import_module("transformer_engine.pytorch")
    extension: Any = sys.modules[EXTENSION]
    kind, norm = (
        (te.LayerNormLinear, {"normalization": shape.norm}) if shape.norm else (te.Linear, {})
    )
    device = torch.device("cuda", torch.cuda.current_device())
    dtype = torch.bfloat16
    x = torch.randn(shape.tokens, shape.columns, device=device, dtype=dtype, requires_grad=True)
    g = torch.randn(shape.tokens, shape.rows, device=device, dtype=dtype)

    def times(option: Option) -> tuple[float, float, float]:
        params = quant_params(te_recipe(option, machine))
        linear = kind(shape.columns, shape.rows, bias=False, params_dtype=dtype, **norm)

        def forward() -> Tensor:
            with extension._get_fp8_autocast_for_quant_params(params, True):
                y: Tensor = linear(x)
                return y

        def both() -> None:
            inputs = [x, linear.weight] if linear.weight.requires_grad else [x]
            torch.autograd.grad(forward(), inputs, g)

        fprop = median_s(forward, device, AUTO_BUDGET_S)
        total = median_s(both, device, AUTO_BUDGET_S)
        linear.weight.requires_grad_(False)
        return fprop, median_s(both, device, AUTO_BUDGET_S), total

    seconds: dict[str, dict[str, float]] = {}
    mixed = []
    for option in sorted(map(Option.parse, shape.options), key=lambda o: len(set(o.formats))):
        fprop, with_dgrad, total = times(option)
        if len(set(option.formats)) > 1:
            mixed.append(total - sum(seconds[option[gemm]][gemm.value] for gemm in Gemm))
            continue
        parts = (fprop, with_dgrad - fprop, total - with_dgrad)
        gemms = zip(Gemm, parts, strict=True)
        seconds[option.fprop] = {gemm.value: max(part, 1e-9) for gemm, part in gemms}
    mixed_s = max(0.0, statistics.median(mixed)) if mixed else 0.0
    return CalibratedLinear(
        names="*",
        out_features=shape.rows,
        in_features=shape.columns,
        seconds=seconds,
        tokens=shape.tokens,
        mixed_s=mixed_s,
    )


def measure(
    size: tuple[int, int, int], device: torch.device, budget_s: float, formats: list[str]
) -> dict[str, dict[str, float]]:
    """Return the seconds of every format, by GEMM.

    Args:
        size: tokens, out_features and in_features.
        device: where to run.
        budget_s: seconds to spend on each GEMM and format.
        formats: names.

    Raises:
        RuntimeError: if memory is short.
    """
    tokens, rows, columns = size
    x, w, g = (
        torch.randn(shape, device=device).to(torch.bfloat16)
        for shape in ((tokens, columns), (rows, columns), (tokens, rows))
    )
    seconds: dict[str, dict[str, float]] = {}
    for name in formats:
        gemms = linear_gemms(x, w, g, Option.uniform(name))
        seconds[name] = {k.value: median_s(call, device, budget_s) for k, call in gemms.items()}
    return seconds


def linear_gemms(
    x: Tensor, w: Tensor, g: Tensor, option: Option
) -> dict[Gemm, Callable[[], Tensor | None]]:
    """Return calls that run the GEMMs of a linear as training does, quantization included.

    Args:
        x: [M, K].
        w: [N, K].
        g: [M, N].
        option: of the linear.
    """
    stream = StochasticStream(StreamKey(seed=0, linear="", iteration=0, microbatch=0))

    def quantized(gemm: Gemm) -> Tensor:
        both = simulated_gemm.quantize_grad_output(
            g, option, stream, x.shape[1], dgrad=gemm is Gemm.DGRAD, wgrad=gemm is Gemm.WGRAD
        )
        return next(each for each in both if each is not None)

    return {
        Gemm.FPROP: lambda: simulated_gemm.fprop(x, w, option),
        Gemm.DGRAD: lambda: simulated_gemm.dgrad(quantized(Gemm.DGRAD), w, option, g.dtype),
        Gemm.WGRAD: lambda: simulated_gemm.wgrad(quantized(Gemm.WGRAD), x, option),
    }


def median_s(call: Callable[[], object], device: torch.device, budget_s: float) -> float:
    """Return the median time of a call; the first run, which compiles and warms up, excluded."""

    def timed() -> float:
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    timed()
    runs = max(3, min(MAX_RUNS, int(budget_s / max(timed(), 1e-9))))
    return statistics.median(timed() for _ in range(runs))

"""Seconds of a linear's GEMMs on this machine, simulated or under Transformer Engine.

A linear is timed forward and backward, with quantization (and a fused norm of Transformer Engine)
and without communication:

    fprop = forward       dgrad = with dX - forward       wgrad = with dX and dW - with dX

The first two are timed with a frozen weight: its forward quantizes X for fprop alone, and not for
wgrad as well. The runs of all options alternate, so that other work on the machine slows all of
them, and the least time of each counts. Every second run gives a second value: where the two halves
of the runs disagree, other work has changed the result. An option gets no seconds if one of its
differences is not above 0 in the runs or in one of their halves.

What an option with several formats takes beside its GEMMs (`mixed_s`) is measured too: the median
of its time less its GEMMs' times, over the options that the linear can run.
"""

import importlib
import logging
import math
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_snip.linears.quantized_linear import LinearCall, quantized_linear
from megatron_snip.linears.te.linear import quant_params
from megatron_snip.linears.te.machine import Machine, te_recipe
from megatron_snip.linears.te.modules import EXTENSION
from megatron_snip.linears.te.quantizers import built_in_recipe
from megatron_snip.options import Option
from megatron_snip.planning.calibration import (
    CalibratedLinear,
)
from megatron_snip.quantizers.stochastic import StochasticStream, StreamKey
from megatron_snip.types import Gemm
from megatron_snip.version import PACKAGES, installed_version

logger = logging.getLogger(__name__)

MIN_RUNS = 4
"""Least number of runs of an option: two for each half."""

MAX_RUNS = 200
"""Largest number of runs of an option; slow ones stop earlier, at the limit of seconds."""

MAX_SPREAD = 0.5
"""Relative difference of the two halves' seconds above which a GEMM is reported as unsteady."""


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


class MeasuredShape(NamedTuple):
    """The seconds of a shape, and what is wrong with them.

    Attributes:
        linear: the seconds of the options that could be measured; None if there are none.
        refused: {option: why it has no seconds}.
        unsteady: {option: the largest spread of its GEMMs}, where that is above `MAX_SPREAD`.
    """

    linear: CalibratedLinear | None
    refused: dict[str, str]
    unsteady: dict[str, float]

    def problems(self) -> list[str]:
        """Return lines about the options that have no seconds or unsteady ones."""
        options_of: dict[str, list[str]] = {}
        for option, why in self.refused.items():
            options_of.setdefault(why, []).append(option)
        lines = [f"no seconds of {', '.join(o)}: {why}" for why, o in options_of.items()]
        if self.unsteady:
            lines.append(
                f"unsteady seconds of {', '.join(self.unsteady)}: two halves of the runs differ by "
                f"up to {max(self.unsteady.values()):.0%}; measure again when nothing else runs on "
                "this machine"
            )
        return lines


TimedLinear = tuple[Callable[[], Tensor], Tensor]
"""A linear's forward on some input, and its weight."""


def this_setup(device: torch.device, **versions: str) -> dict[str, Any]:
    """Return a table's machine, device, date and versions: those installed and `versions`."""
    return {
        "machine": f"{platform.node()} ({platform.machine()})",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "versions": {name: str(installed_version(name)) for name in PACKAGES} | versions,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def measure(
    shape: TimedShape,
    machine: Machine | None,
    device: torch.device,
    budget_s: float,
    limit_s: float = math.inf,
    progress: Callable[[float], object] = lambda share: None,
) -> MeasuredShape:
    """Time a linear under every option of a shape; see the file's description.

    Args:
        shape: what to measure.
        machine: gives the recipes of Transformer Engine; None simulates.
        device: where to run.
        budget_s: seconds to spend on each time.
        limit_s: most seconds to spend on the shape; the last run may end a little later.
        progress: called with the share of the work that is done, from 0 to 1.

    Raises:
        RuntimeError: if memory is short.
    """
    end = time.perf_counter() + limit_s
    x = torch.randn(shape.tokens, shape.in_features).bfloat16().to(device).requires_grad_()
    g = torch.randn(shape.tokens, shape.out_features).bfloat16().to(device)

    def timed(call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def run(forward: Callable[[], Tensor], weight: Tensor) -> tuple[float, float, float]:
        """Return the seconds of the forward, with dX, and with dX and dW."""

        def both() -> None:
            inputs = [x, weight] if weight.requires_grad else [x]
            torch.autograd.grad(forward(), inputs, g)

        weight.requires_grad_(True)
        with_wgrad = timed(both)
        weight.requires_grad_(False)
        return timed(forward), timed(both), with_wgrad

    options = list(map(Option.parse, shape.options.split(",")))
    make = simulated_linear if machine is None else partial(te_linear, machine)
    linears: dict[Option, TimedLinear] = {}
    runs: dict[Option, list[tuple[float, float, float]]] = {option: [] for option in options}
    left = options
    while left and time.perf_counter() < end:
        for option in left:
            if time.perf_counter() >= end:
                break
            if option not in linears:
                forward, weight = make(shape, option, x)
                if linears:  # one weight for all options: a model's largest takes gigabytes
                    weight.data = next(iter(linears.values()))[1].data
                linears[option] = (forward, weight)
                run(forward, weight)  # compiles and warms up
            if time.perf_counter() < end:
                runs[option].append(run(*linears[option]))
        wanted = 3 * budget_s  # a run has three times
        shares = [min(1.0, sum(map(sum, runs[option])) / wanted) for option in options]
        progress(min(1.0, statistics.mean(shares)))
        left = [
            option
            for option, share in zip(options, shares, strict=True)
            if len(runs[option]) < MIN_RUNS or (share < 1.0 and len(runs[option]) < MAX_RUNS)
        ]
    return _measured(shape, runs)


def _measured(
    shape: TimedShape, runs: Mapping[Option, Sequence[tuple[float, float, float]]]
) -> MeasuredShape:
    """Return the seconds of the GEMMs: the least of the runs, where their halves agree."""

    def gemms(of_runs: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
        forward, with_dgrad, with_wgrad = map(min, zip(*of_runs, strict=True))
        return forward, with_dgrad - forward, with_wgrad - with_dgrad

    seconds: dict[str, dict[str, float]] = {}
    refused: dict[str, str] = {}
    unsteady: dict[str, float] = {}
    mixed: list[float] = []
    # Uniform options first: a mixed one is compared with them.
    for option in sorted(runs, key=lambda one: len(set(one.formats))):
        name = str(option)
        if len(runs[option]) < MIN_RUNS:
            refused[name] = f"the time limit came before {MIN_RUNS} runs"
            continue
        parts = gemms(runs[option])
        if len(set(option.formats)) > 1:
            if set(option.formats) <= seconds.keys():
                of_gemms = sum(seconds[option[gemm]][gemm.value] for gemm in Gemm)
                mixed.append(sum(parts) - of_gemms)
            continue
        halves = [gemms(runs[option][start::2]) for start in (0, 1)]
        spread = 0.0
        for gemm, part, first, second in zip(Gemm, parts, *halves, strict=True):
            least = min(part, first, second)
            if least <= 0.0:
                refused[name] = (
                    f"{gemm.value} came out at {1e3 * least:.3g} ms: other work on the machine "
                    "takes longer than it"
                )
                break
            spread = max(spread, abs(first - second) / part)
        if name in refused:
            continue
        seconds[name] = {gemm.value: part for gemm, part in zip(Gemm, parts, strict=True)}
        if spread > MAX_SPREAD:
            unsteady[name] = spread
    if not seconds:
        return MeasuredShape(None, refused, unsteady)
    linear = CalibratedLinear(
        names="*",
        out_features=shape.out_features,
        in_features=shape.in_features,
        seconds=seconds,
        tokens=shape.tokens,
        # An option of several formats takes no less than its GEMMs: below 0 is noise.
        mixed_s=max(0.0, statistics.median(mixed or [0.0])),
    )
    return MeasuredShape(linear, refused, unsteady)


def te_linear(machine: Machine, shape: TimedShape, option: Option, x: Tensor) -> TimedLinear:
    """Return a linear of Transformer Engine, with its norm if it has one."""
    te: Any = importlib.import_module("transformer_engine.pytorch")
    extension: Any = importlib.import_module(EXTENSION)
    fused = {"normalization": shape.norm} if shape.norm else {}
    make = te.LayerNormLinear if shape.norm else te.Linear
    linear = make(shape.in_features, shape.out_features, bias=False, params_dtype=x.dtype, **fused)
    recipe = te_recipe(option, machine)
    params = quant_params(recipe)
    # Megatron opens the autocast of the job's own recipe around each layer.
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    if recipe.follows_the_job:
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

    call = LinearCall(option, lambda: stream)
    return partial(quantized_linear, x, weight, None, call), weight

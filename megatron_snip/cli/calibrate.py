"""`megatron-snip calibrate`: measure this machine's GEMMs, for planning by time.

Every linear shape of a model runs its three GEMMs in every format, quantization included, as
`--snip-backend simulate` runs them. A GEMM is timed by itself, so what training does once for two
of them (reading G, quantizing W) is counted in each. With the resulting table,
`megatron-snip plan --cost time` counts this machine's seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

from megatron_snip.cli.common import (
    add_examples,
    console,
    new_table,
    positive,
    write_output,
)
from megatron_snip.errors import UsageError
from megatron_snip.formats import FORMATS, get_format
from megatron_snip.linears import simulated_gemm
from megatron_snip.options import Option
from megatron_snip.planning.calibration import CalibratedLinear, CalibrationTable
from megatron_snip.quantizers import StochasticStream, StreamKey
from megatron_snip.trainer.config import TrainConfig, load_train_config
from megatron_snip.types import Gemm
from megatron_snip.version import __version__

MAX_RUNS = 200
"""Most times a GEMM is run; fast ones stop here, slow ones at --seconds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add_examples(
        parser,
        "megatron-snip calibrate --config configs/demo.yaml --output demo-seconds.json",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        type=Path,
        required=True,
        help="a training config; its linears are measured as one tensor-parallel rank holds them",
    )
    parser.add_argument(
        "--formats", metavar="A,B,...", default=",".join(FORMATS), help="formats to measure [all]"
    )
    parser.add_argument(
        "--seconds",
        metavar="S",
        type=positive,
        default=0.5,
        help="time to spend on each GEMM and format [0.5]",
    )
    parser.add_argument(
        "--output", metavar="TABLE.json", type=Path, required=True, help="where the table goes"
    )


def run(args: argparse.Namespace) -> int:
    """Measure, print and write; return the exit status.

    Raises:
        UsageError: for bad input, or if the table cannot be written.
    """
    config = load_train_config(args.config, {}, {})
    shapes, tokens = _model_shapes(config), config.micro_batch_size * config.seq_length
    formats = [get_format(name.strip()).name for name in args.formats.split(",")]
    if not args.output.parent.is_dir() or args.output.is_dir():
        raise UsageError(f"--output: '{args.output}' is no file in a folder that exists")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    linears = []
    for names, (rows, columns) in shapes.items():
        try:
            seconds = measure((tokens, rows, columns), device, args.seconds, formats)
        except (MemoryError, RuntimeError) as error:
            # How torch says, on any device, that memory is short, or that no memory is so large.
            if "allocate" not in str(error) and "overflow" not in str(error):
                raise
            raise UsageError(
                f"'{names}': {rows} x {columns} with {tokens} tokens does not fit into the memory "
                f"of {device_name}"
            ) from None
        linears.append(
            CalibratedLinear(names=names, out_features=rows, in_features=columns, seconds=seconds)
        )
    table = CalibrationTable(
        machine=f"{platform.node()} ({platform.machine()})",
        device=device_name,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={"torch": str(torch.__version__), "megatron-snip": __version__},
        tokens=tokens,
        linears=tuple(linears),
    )
    write_output(args.output, table.model_dump_json(indent=1) + "\n")
    _print(table)
    print(f"wrote {args.output}")
    return 0


def _model_shapes(config: TrainConfig) -> dict[str, tuple[int, int]]:
    """Return {glob: (out_features, in_features)} of a layer's linears, of one shard."""
    hidden, tp = config.hidden_size, config.tensor_model_parallel_size
    groups = config.query_groups * config.head_width
    path, ffn = "mlp", config.ffn_width // tp
    if config.num_experts is not None:
        path, ffn = "mlp.experts", config.expert_ffn_width // config.expert_tensor_size
    return {
        "*.self_attention.linear_qkv": ((hidden + 2 * groups) // tp, hidden),
        "*.self_attention.linear_proj": (hidden, hidden // tp),
        f"*.{path}.linear_fc1": (2 * ffn, hidden),
        f"*.{path}.linear_fc2": (hidden, ffn),
    }


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
        seconds[name] = {k.value: _median_s(call, device, budget_s) for k, call in gemms.items()}
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


def _median_s(call: Callable[[], object], device: torch.device, budget_s: float) -> float:
    """Return the median time of a call; the first run, which compiles and warms up, excluded."""
    from megatron_snip.patches.cpu.tensors import CudaOnCpu

    def timed() -> float:
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    on_cpu = CudaOnCpu() if device.type == "cpu" else contextlib.nullcontext()
    with on_cpu:  # training on the CPU computes products of BF16 in FP32
        timed()
        runs = max(3, min(MAX_RUNS, int(budget_s / max(timed(), 1e-9))))
        return statistics.median(timed() for _ in range(runs))


def _print(table: CalibrationTable) -> None:
    times = (*(f"{gemm.value} ms" for gemm in Gemm), "TFLOP/s")
    shown = new_table(("linears", "out x in", "format"), times)
    for entry in table.linears:
        flops = 6.0 * table.tokens * entry.out_features * entry.in_features
        for name, by_gemm in entry.seconds.items():
            cells = (f"{1e3 * by_gemm[gemm.value]:.3f}" for gemm in Gemm)
            rate = f"{flops / sum(by_gemm.values()) / 1e12:.3g}"
            size = f"{entry.out_features} x {entry.in_features}"
            shown.add_row(entry.names, size, name, *cells, rate)
    out = console()
    out.print(shown)
    out.print(f"{table.tokens} tokens on {table.device}, {table.machine}")

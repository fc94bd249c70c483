"""`megatron-snip calibrate`: measure this machine's GEMMs, for planning by time.

Every linear shape of a model runs its three GEMMs in every format, quantization included, through
the code that training runs: natively where this machine can, by emulation elsewhere. The table
that comes out makes `megatron-snip plan --cost time` count this machine's seconds.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table as RichTable

from megatron_snip.cli.plan_tables import plain_console
from megatron_snip.errors import UnsupportedError, UsageError
from megatron_snip.formats import FORMATS, get_format
from megatron_snip.options import Option
from megatron_snip.planning.calibration import (
    CalibratedLinear,
    CalibrationTable,
    write_calibration,
)
from megatron_snip.trainer.config import load_train_config
from megatron_snip.trainer.sizes import linear_shapes
from megatron_snip.types import Gemm, split_linear_name
from megatron_snip.version import __version__

if TYPE_CHECKING:
    import torch

EXAMPLES = """\
examples:
  megatron-snip calibrate --config configs/demo.yaml --output demo-seconds.json
  megatron-snip calibrate --linear '*.mlp.linear_fc1=28672x8192' --tokens 4096 --output t.json
"""

MAX_RUNS = 200
"""Most times a GEMM is run; fast ones stop here, slow ones at --seconds."""


@dataclass(frozen=True)
class Shape:
    """A linear to measure: the glob it stands for, and [out_features, in_features]."""

    names: str
    out_features: int
    in_features: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument(
        "--config",
        metavar="FILE",
        type=Path,
        help="a training config; its linears are measured as one tensor-parallel rank holds them",
    )
    parser.add_argument(
        "--linear",
        metavar="GLOB=OUTxIN",
        action="append",
        help="a shape to measure and the linears it stands for; may be repeated",
    )
    parser.add_argument(
        "--tokens", metavar="M", help="tokens in a GEMM [a microbatch of --config, else 1024]"
    )
    parser.add_argument(
        "--formats", metavar="A,B,...", default=",".join(FORMATS), help="formats to measure [all]"
    )
    parser.add_argument("--device", metavar="NAME", help="cpu or cuda [cuda where there is one]")
    parser.add_argument(
        "--seconds", metavar="S", default="0.5", help="time to spend on each GEMM and format [0.5]"
    )
    parser.add_argument(
        "--output", metavar="TABLE.json", type=Path, required=True, help="where the table goes"
    )


def run(args: argparse.Namespace) -> int:
    """Measure, print and write; return the exit status.

    Raises:
        UsageError: for bad input, or if the table cannot be written.
    """
    shapes, tokens = _shapes(args)
    formats = [get_format(name.strip()).name for name in args.formats.split(",") if name.strip()]
    if not formats:
        raise UsageError("--formats names no format")
    if not args.output.parent.is_dir():
        raise UsageError(f"--output: there is no folder '{args.output.parent}'")
    budget_s = _number("--seconds", args.seconds)
    device = _device(args.device)
    linears = []
    for shape in shapes:
        bench = _Bench(shape, tokens, device, budget_s)
        linears.append(
            CalibratedLinear(
                names=shape.names,
                out_features=shape.out_features,
                in_features=shape.in_features,
                seconds=_measure(bench, formats),
            )
        )
    table = CalibrationTable(
        machine=_machine(),
        device=_device_name(device),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={"torch": _torch_version(), "megatron-snip": __version__},
        tokens=tokens,
        linears=tuple(linears),
    )
    try:
        write_calibration(table, args.output)
    except OSError as error:
        raise UsageError(f"cannot write '{args.output}': {error.strerror or error}") from None
    _print(table, args.output)
    return 0


def _shapes(args: argparse.Namespace) -> tuple[list[Shape], int]:
    shapes, tokens = [], 1024
    if args.config is not None:
        config = load_train_config(args.config, {}, {})
        tokens = config.micro_batch_size * config.seq_length
        shards = {split_linear_name(s.name)[2]: s for s in linear_shapes(config)}
        tp = config.tensor_model_parallel_size
        for module, s in shards.items():
            # A rank's FLOPs are 1 / TP of the linear's, whichever dimension is split.
            whole_in = s.in_features == s.shard[1]
            out_features = s.out_features // tp if whole_in else s.out_features
            shapes.append(Shape(f"*.{module}", out_features, s.shard[1]))
    shapes += [_shape(text) for text in args.linear or []]
    if not shapes:
        raise UsageError("nothing to measure: give --config FILE or --linear GLOB=OUTxIN")
    if args.tokens is not None:
        tokens = max(1, int(_number("--tokens", args.tokens)))
    return shapes, tokens


def _shape(text: str) -> Shape:
    names, sign, size = text.rpartition("=")
    out_features, times, in_features = size.partition("x")
    sizes = (out_features, in_features)
    if not names or not sign or not times or not all(s.isdecimal() and int(s) > 0 for s in sizes):
        raise UsageError(f"--linear: '{text}' is not GLOB=OUTxIN, e.g. '*.linear_fc1=4096x1024'")
    return Shape(names, int(out_features), int(in_features))


def _number(flag: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < 2**31:
        raise UsageError(f"{flag} must be a number above 0, got '{text}'")
    return value


def _device(name: str | None) -> torch.device:
    import torch

    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise UsageError(f"--device must be cpu or cuda, got '{name}'")
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no CUDA device; use --device cpu")
    return torch.device(name)


def _device_name(device: torch.device) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _torch_version() -> str:
    import torch

    return str(torch.__version__)


def _machine() -> str:
    return f"{platform.node()} ({platform.machine()})"


class _Bench:
    """One shape's operands, and its GEMMs as training runs them."""

    def __init__(self, shape: Shape, tokens: int, device: torch.device, budget_s: float) -> None:
        import torch

        from megatron_snip.quantizers import StochasticStream, StreamKey

        generator = torch.Generator(device).manual_seed(0)

        def random(rows: int, cols: int) -> torch.Tensor:
            values = torch.randn(rows, cols, generator=generator, device=device)
            return values.to(torch.bfloat16)

        self.x = random(tokens, shape.in_features)  # [M, K]
        self.w = random(shape.out_features, shape.in_features)  # [N, K]
        self.g = random(tokens, shape.out_features)  # [M, N]
        self.stream = StochasticStream(StreamKey(seed=0, linear=shape.names, step=0, microbatch=0))
        self.device = device
        self.budget_s = budget_s

    def gemm(self, gemm: Gemm, option: Option) -> Callable[[], torch.Tensor]:
        """Return a call that runs one GEMM, quantization included."""
        from megatron_snip.linears import gemms

        if gemm is Gemm.FPROP:
            return lambda: gemms.fprop(self.x, self.w, option)
        if gemm is Gemm.DGRAD:
            return lambda: gemms.dgrad(self.g, self.w, option, self.stream)
        return lambda: gemms.wgrad(self.g, self.x, option, self.stream)

    def seconds(self, call: Callable[[], torch.Tensor]) -> float:
        """Return the median time of a call; the first runs, which compile and warm up, excluded."""
        self._timed(call)
        first = self._timed(call)
        runs = max(3, min(MAX_RUNS, int(self.budget_s / max(first, 1e-9))))
        return statistics.median(self._timed(call) for _ in range(runs))

    def _timed(self, call: Callable[[], torch.Tensor]) -> float:
        import torch

        start = time.perf_counter()
        call()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start


def _measure(bench: _Bench, formats: list[str]) -> dict[str, dict[str, float]]:
    seconds: dict[str, dict[str, float]] = {}
    for name in formats:
        option = Option.uniform(name)
        try:
            seconds[name] = {g.value: bench.seconds(bench.gemm(g, option)) for g in Gemm}
        except (UnsupportedError, NotImplementedError) as error:
            print(f"megatron-snip calibrate: {name} does not run here: {error}", file=sys.stderr)
    if not seconds:
        raise UsageError("none of the formats runs on this machine")
    return seconds


def _print(table: CalibrationTable, path: Path) -> None:
    console = plain_console()
    shown = RichTable("linears", "out x in", "format", box=box.SIMPLE)
    for heading in (*(f"{gemm.value} ms" for gemm in Gemm), "TFLOP/s"):
        shown.add_column(heading, justify="right")
    for entry in table.linears:
        flops = 6.0 * table.tokens * entry.out_features * entry.in_features
        for name, by_gemm in entry.seconds.items():
            shown.add_row(
                entry.names,
                f"{entry.out_features} x {entry.in_features}",
                name,
                *(f"{1e3 * by_gemm[gemm.value]:.3f}" for gemm in Gemm),
                f"{flops / sum(by_gemm.values()) / 1e12:.3g}",
            )
    console.print(shown)
    console.print(f"{table.tokens} tokens on {table.device}, {table.machine}; wrote {path}")

"""`megatron-snip calibrate`: measure this machine's GEMMs, for planning by time.

Every linear shape of a model runs its three GEMMs in every format, quantization included, as
`--snip-backend simulate` runs them. With the resulting table, `megatron-snip plan --cost time`
counts this machine's seconds.
"""

from __future__ import annotations

import argparse
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_snip.cli.common import add_examples, console, integer, new_table, positive
from megatron_snip.cli.gemm_bench import Shape, measure
from megatron_snip.errors import UsageError
from megatron_snip.formats import FORMATS, get_format
from megatron_snip.planning.calibration import (
    CalibratedLinear,
    CalibrationTable,
    write_calibration,
)
from megatron_snip.trainer.config import TrainConfig, load_train_config
from megatron_snip.types import Gemm
from megatron_snip.version import __version__

if TYPE_CHECKING:
    import torch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add_examples(
        parser,
        "megatron-snip calibrate --config configs/demo.yaml --output demo-seconds.json",
        "megatron-snip calibrate --linear '*.mlp.linear_fc1=28672x8192' --output t.json",
    )
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
    formats = _formats(args.formats)
    _check_output(args.output)
    budget_s = positive("--seconds", args.seconds)
    device = _device(args.device)
    linears = []
    for shape in shapes:
        try:
            seconds = measure(shape, tokens, device, budget_s, formats)
        except (MemoryError, RuntimeError) as error:
            # How torch says, on any device, that memory is short, or that no memory is so large.
            if "allocate" not in str(error) and "overflow" not in str(error):
                raise
            raise UsageError(
                f"'{shape.names}': {shape.out_features} x {shape.in_features} with {tokens} tokens "
                f"does not fit into the memory of {_device_name(device)}"
            ) from None
        linears.append(
            CalibratedLinear(
                names=shape.names,
                out_features=shape.out_features,
                in_features=shape.in_features,
                seconds=seconds,
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


def _formats(text: str) -> list[str]:
    names = dict.fromkeys(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise UsageError("--formats names no format")
    try:
        return [get_format(name).name for name in names]
    except UsageError as error:
        raise UsageError(f"--formats: {error}") from None


def _check_output(path: Path) -> None:
    """Refuse, before anything is measured, a path that no table can be written to."""
    if not path.parent.is_dir():
        raise UsageError(f"--output: there is no folder '{path.parent}'")
    if path.is_dir():
        raise UsageError(f"--output: '{path}' is a folder; name a file in it")


def _shapes(args: argparse.Namespace) -> tuple[list[Shape], int]:
    shapes: list[Shape] = []
    tokens = 1024
    if args.config is not None:
        config = load_train_config(args.config, {}, {})
        tokens = config.micro_batch_size * config.seq_length
        shapes = _model_shapes(config)
    shapes += [_shape(text) for text in args.linear or []]
    if not shapes:
        raise UsageError("nothing to measure: give --config FILE or --linear GLOB=OUTxIN")
    globs = [shape.names for shape in shapes]
    for glob in globs:
        if globs.count(glob) > 1:
            raise UsageError(f"'{glob}' has two shapes, of which planning would take the first")
    if args.tokens is not None:
        tokens = integer("--tokens", args.tokens)
    return shapes, tokens


def _model_shapes(config: TrainConfig) -> list[Shape]:
    """Return the linears of a layer as one tensor-parallel rank holds them."""
    hidden, tp = config.hidden_size, config.tensor_model_parallel_size
    groups = config.query_groups * config.head_width
    path, ffn = "mlp", config.ffn_width // tp
    if config.num_experts is not None:
        path, ffn = "mlp.experts", config.expert_ffn_width // config.expert_tensor_size
    return [
        Shape("*.self_attention.linear_qkv", (hidden + 2 * groups) // tp, hidden),
        Shape("*.self_attention.linear_proj", hidden, hidden // tp),
        Shape(f"*.{path}.linear_fc1", 2 * ffn, hidden),
        Shape(f"*.{path}.linear_fc2", hidden, ffn),
    ]


def _shape(text: str) -> Shape:
    names, sign, size = text.rpartition("=")
    out_features, times, in_features = size.partition("x")
    if not (names and sign and times and out_features and in_features):
        raise UsageError(f"--linear: '{text}' is not GLOB=OUTxIN, e.g. '*.linear_fc1=4096x1024'")
    flag = f"--linear: each size of '{text}' (GLOB=OUTxIN)"
    return Shape(names, integer(flag, out_features), integer(flag, in_features))


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


def _print(table: CalibrationTable, path: Path) -> None:
    out = console()
    times = (*(f"{gemm.value} ms" for gemm in Gemm), "TFLOP/s")
    shown = new_table(("linears", "out x in", "format"), times)
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
    out.print(shown)
    out.print(f"{table.tokens} tokens on {table.device}, {table.machine}; wrote {path}")

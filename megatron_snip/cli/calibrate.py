"""`megatron-snip calibrate`: measure this machine's GEMMs, for planning by time.

Every linear shape of a model runs forward and backward in every format, quantization included, as
Transformer Engine runs it; on a machine that does not, as `--snip-backend simulate` does. With the
resulting table, `megatron-snip plan --cost time` counts this machine's seconds.
"""

import argparse
import contextlib
import math
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from megatron_snip.cli.common import (
    check_output,
    integer,
    new_table,
    positive,
    progress,
    write_output,
)
from megatron_snip.errors import SnipError, UsageError
from megatron_snip.formats import FORMATS, get_format
from megatron_snip.linears.calibrate import MeasuredShape, TimedShape, measure, this_setup
from megatron_snip.linears.te.machine import Machine, te_support, this_machine
from megatron_snip.linears.te.recipe_table import RECIPES
from megatron_snip.linears.te.refusals import te_refusal
from megatron_snip.options import Option
from megatron_snip.output import console
from megatron_snip.patches.cpu.tensors import CudaOnCpu
from megatron_snip.planning.calibration import CalibrationTable
from megatron_snip.trainer.config import TrainConfig, load_train_config
from megatron_snip.types import Gemm

EXAMPLES = (
    "megatron-snip calibrate --config configs/demo.yaml --output demo-seconds.json",
    "megatron-snip calibrate --linear '*.mlp.linear_fc1=28672x8192' --output t.json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add = parser.add_argument
    text = "a training config; its linears are measured as one tensor-parallel rank holds them"
    add("--config", metavar="FILE", type=Path, help=text)
    text = "a shape to measure and the linears it stands for; may be repeated"
    add("--linear", metavar="GLOB=OUTxIN", type=_shape, action="append", default=[], help=text)
    text = "tokens in a GEMM [a microbatch of --config, else 1024]"
    add("--tokens", metavar="M", type=integer, help=text)
    text = "formats to measure; those that Transformer Engine cannot run here are left out [all]"
    add("--formats", metavar="A,B,...", default=",".join(FORMATS), help=text)
    add("--seconds", metavar="S", type=positive, default=0.5, help="per GEMM and format [0.5]")
    text = "most seconds to measure for; what is left then has no seconds in the table [600]"
    add("--time-limit", metavar="S", type=positive, default=600.0, help=text)
    add("--output", metavar="TABLE.json", type=Path, required=True, help="where the table goes")


def run(args: argparse.Namespace) -> int:
    """Measure, print and write; return the exit status.

    Raises:
        UsageError: for bad input, or if the table cannot be written.
        SnipError: if nothing could be measured.
    """
    check_output(args.output, (args.config,), "table of seconds")
    shapes, tokens = _shapes(args)
    given = [get_format(name.strip()).name for name in args.formats.split(",")]
    formats = list(dict.fromkeys(given))
    is_file = args.output.parent.is_dir() and not args.output.is_dir() and str(args.output) != "-"
    if not is_file:  # found before minutes of measuring
        raise UsageError(f"--output: '{args.output}' is no file in a folder that exists")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    setup = this_setup(device)
    here = this_machine(with_te=True)
    machine = None if None in (here.capability, here.te_version) else here
    left_out: dict[str, str] = {}
    if machine is not None:
        sizes = [tokens]
        for rows, columns in shapes.values():
            sizes += [rows, columns]
        left_out = _refused(formats, machine, sizes)
        formats = [name for name in formats if name not in left_out]
    timed = {
        names: TimedShape(rows, columns, tokens, "", ",".join(formats))
        for names, (rows, columns) in shapes.items()
    }
    found = _measured(timed, machine, device, args)
    linears = [
        measured.linear.model_copy(update={"names": names})
        for names, measured in found.items()
        if measured.linear is not None
    ]
    if not linears:
        raise SnipError(
            f"no option of any shape could be measured, so '{args.output}' was not written; "
            "measure when nothing else runs on this machine, or give a longer --time-limit"
        )
    table = CalibrationTable(**setup, tokens=tokens, linears=tuple(linears))
    write_output(args.output, table.model_dump_json(indent=1) + "\n")
    _print(table)
    for name, reason in left_out.items():
        print(f"left out {name}: {reason}")
    how = "simulated, which is never faster than bf16" if machine is None else "Transformer Engine"
    print(f"GEMMs: {how}\nwrote {args.output}")
    return 0


def _measured(
    shapes: Mapping[str, TimedShape],
    machine: Machine | None,
    device: torch.device,
    args: argparse.Namespace,
) -> dict[str, MeasuredShape]:
    """Measure shapes by glob; print a line for each on stderr, and progress if that is a terminal.

    Raises:
        UsageError: if a shape does not fit into memory.
    """
    # Training on the CPU computes products of BF16 in FP32.
    on_cpu = CudaOnCpu() if device.type == "cpu" else contextlib.nullcontext()
    out = console(stderr=True)
    found: dict[str, MeasuredShape] = {}
    end = time.monotonic() + args.time_limit
    with progress("measuring", out) as done:
        for number, (names, shape) in enumerate(shapes.items()):
            size = f"{shape.out_features} x {shape.in_features}"
            start = time.monotonic()
            limit_s = (end - start) / (len(shapes) - number)

            def tick(share: float, before: int = number) -> None:
                done((before + share) / len(shapes))

            try:
                with on_cpu:
                    measured = measure(shape, machine, device, args.seconds, limit_s, tick)
            except (MemoryError, RuntimeError) as error:
                # torch's messages on any device: memory is short, or no memory is that large.
                if "allocate" not in str(error) and "overflow" not in str(error):
                    raise
                raise UsageError(
                    f"'{names}': {size} with {shape.tokens} tokens does not fit into the memory of "
                    f"this machine's {device.type}"
                ) from None
            found[names] = measured
            seconds = {} if measured.linear is None else measured.linear.seconds
            out.print(
                f"{number + 1} of {len(shapes)}: {names}, {size}: {len(seconds)} formats in "
                f"{time.monotonic() - start:.1f} s",
                soft_wrap=True,
            )
            for line in measured.problems():
                out.print(f"  warning: {line}", soft_wrap=True)
            tick(1.0)
    return found


def _refused(formats: list[str], machine: Machine, sizes: Iterable[int]) -> dict[str, str]:
    """Return the formats that Transformer Engine does not run here, and why.

    Raises:
        UsageError: if it runs none of them.
    """
    found = {}
    divisor = math.gcd(*sizes)  # what divides all sizes
    for name in formats:
        reason = te_refusal(Option.uniform(name), machine)
        if reason is None:
            multiple = RECIPES[te_support(name, machine)[0]].dim_multiple
            if divisor % multiple:
                reason = f"features and tokens must be multiples of {multiple}"
        if reason is not None:
            found[name] = reason
    if len(found) == len(formats):
        raise UsageError(
            f"--formats: Transformer Engine runs none of {', '.join(formats)} here; "
            f"{found[formats[0]]}"
        )
    return found


def _model_shapes(config: TrainConfig) -> dict[str, tuple[int, int]]:
    """Return {glob: (out_features, in_features)} of a layer's linears, of one shard."""
    hidden = config.hidden_size
    tp = config.tensor_model_parallel_size
    groups = hidden // config.num_attention_heads * config.query_groups
    path = "mlp"
    ffn = config.ffn_width // tp
    if config.num_experts is not None:
        ffn = (config.moe_ffn_hidden_size or config.ffn_width) // config.expert_tensor_size
        path = "mlp.experts"
    return {
        "*.self_attention.linear_qkv": ((hidden + 2 * groups) // tp, hidden),
        "*.self_attention.linear_proj": (hidden, hidden // tp),
        f"*.{path}.linear_fc1": (2 * ffn, hidden),
        f"*.{path}.linear_fc2": (hidden, ffn),
    }


def _shape(text: str) -> tuple[str, tuple[int, int]]:
    found = re.fullmatch(r"(.+)=([1-9]\d{0,8})x([1-9]\d{0,8})", text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"'{text}' is not GLOB=OUTxIN, e.g. '*.linear_fc1=512x128'"
        )
    return found[1], (int(found[2]), int(found[3]))


def _shapes(args: argparse.Namespace) -> tuple[dict[str, tuple[int, int]], int]:
    """Return {glob: (out_features, in_features)} and the number of tokens."""
    shapes: dict[str, tuple[int, int]] = {}
    tokens = 1024
    if args.config is not None:
        config = load_train_config(args.config, {}, {})
        tokens = config.micro_batch_size * config.seq_length
        shapes = _model_shapes(config)
    shapes |= dict(args.linear)
    if not shapes:
        raise UsageError("nothing to measure: give --config FILE or --linear GLOB=OUTxIN")
    return shapes, args.tokens or tokens


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

"""What SNIP costs a training iteration, measured or ordinary: time, and peak memory.

    python -m benchmarks.refresh [--rounds 15] [--shape small] [--microbatches 1]

A BF16 Llama trains in this process as in a run with `--snip-collect-only`: forward and backward
under the controller, optimizer, scheduler, metrics, and the files of each measurement. Three kinds
of iterations take turns: those that measure (with formats fp8 and fp4), ordinary ones, and ones
without SNIP, for which Megatron's own methods are restored. `ratio` is that of an iteration that
measures to the ordinary one beside it, `installed_ratio` that of an ordinary one to the one without
SNIP beside it, in CPU seconds of one thread on a CPU. A result is the median over the pairs, with
its 95 % interval. The solver is left out: it works in another
process (`benchmarks.stall`). Memory is counted by torch's profiler on the CPU and by the allocator
on a GPU; peaks are above what is held when the iteration begins.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # one core, whatever else the machine does

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from benchmarks.lab import Lab, open_lab
from benchmarks.machine import RESULTS, append_row, has_gpu
from megatron_snip.config import SnipConfig
from megatron_snip.reporting.run_directory import RunDirectory
from megatron_snip.run.controller import SnipController
from megatron_snip.trainer.loop import PlainTraining, train_step

T = TypeVar("T")

SHAPES = {
    "small": {"num_layers": 4, "hidden_size": 256, "ffn_hidden_size": 512, "seq_length": 256},
    "short": {"num_layers": 4, "hidden_size": 512, "ffn_hidden_size": 1024, "seq_length": 64},
    "wide": {"num_layers": 4, "hidden_size": 768, "ffn_hidden_size": 2048, "seq_length": 512},
    "deep": {"num_layers": 24, "hidden_size": 768, "ffn_hidden_size": 2048, "seq_length": 256},
    "large": {"num_layers": 8, "hidden_size": 2048, "ffn_hidden_size": 5632, "seq_length": 2048},
}
"""A microbatch is four sequences."""

WARM_UP_STEPS = 2
"""Steps before the first one that is timed."""


class Training:
    """Trains the lab's model: iterations that measure, ordinary ones, and ones without SNIP."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        """Start after the lab's steps so far.

        Args:
            lab: the model; it is left without its own planned linears.
            folder: for the files of the run.
        """
        self.config = SnipConfig(
            formats=("fp8", "fp4"),
            collect_only=True,
            start_step=lab.step + 1,
            interval=3,
        )
        self._lab = lab
        lab.model.uninstall()  # the controller has its own
        state = lab.state
        writers = [RunDirectory(folder)]
        self._controller = SnipController(
            self.config, state.model, state.optimizer, writers=writers
        )

    def iterate(self) -> None:
        """Make the next iteration."""
        lab = self._lab
        lab.step += 1
        metrics = train_step(lab.step, lab.state, lab.datasets.train, self._controller)
        self._controller.end_iteration(lab.step, metrics)

    def iterate_plain(self) -> None:
        """Make the next iteration without SNIP."""
        lab = self._lab
        lab.step += 1
        train_step(lab.step, lab.state, lab.datasets.train, PlainTraining())

    def run(self, each: Callable[[Callable[[], None]], T]) -> tuple[T, T, T]:
        """Return what `each` returns for an iteration that measures, one that does not, and plain.

        The last one is without SNIP.
        """
        measured = each(self.iterate)
        ordinary = each(self.iterate)
        self._controller.model.uninstall()
        plain = each(self.iterate_plain)
        self._controller.model.install()
        return measured, ordinary, plain

    def close(self) -> None:
        """End the run."""
        self._controller.close()


def seconds(run: Callable[[], object]) -> float:
    """Return how long `run` takes, the device included; on the CPU the process's own time.

    The process's time does not count other programs on a busy machine.
    """
    _wait()
    clock = time.perf_counter if has_gpu() else time.process_time
    begin = clock()
    run()
    _wait()
    return clock() - begin


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the most memory that `run` holds above what was held when it began."""
    if has_gpu():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        _wait()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    assert results is not None
    events = [(e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]"]
    held = most = 0
    for _, size in sorted(events, key=lambda event: event[0]):
        held += size
        most = max(most, held)
    return most


def tensor_bytes() -> int:
    """Return the bytes of all tensors alive, each storage once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def compare(lab: Lab, training: Training, rounds: int) -> dict[str, Any]:
    """Return times and memory of the kinds of iterations, which take turns."""
    training.run(lambda iterate: iterate())
    measured: list[float] = []
    ordinary: list[float] = []
    plain: list[float] = []
    for _ in range(rounds):
        these = training.run(seconds)
        measured.append(these[0])
        ordinary.append(these[1])
        plain.append(these[2])
    ratios = [m / o for m, o in zip(measured, ordinary, strict=True)]
    installed = [o / p for o, p in zip(ordinary, plain, strict=True)]
    ratio = statistics.median(ratios)
    before = tensor_bytes()
    peak_measured, peak_ordinary, _ = training.run(peak_bytes)
    held = tensor_bytes() - before
    parameters = sum(p.numel() for p in lab.state.model[0].parameters())
    linear = max(i.in_features * i.out_features for i in lab.model.job.linears)
    tokens = lab.config.micro_batch_size * lab.config.seq_length
    widest = max(max(i.in_features, i.out_features) for i in lab.model.job.linears)
    return {
        "iteration_s": statistics.median(ordinary),
        "measured_s": statistics.median(measured),
        "ratio": ratio,
        "ratio_interval": median_interval(ratios),
        "installed_ratio": statistics.median(installed),
        "installed_ratio_interval": median_interval(installed),
        "mean_ratio_at_interval_100": 1 + (ratio - 1) / 100,
        "held_share_of_parameters": held / (2 * parameters),
        "peak_iteration_bytes": peak_ordinary,
        "peak_measured_bytes": peak_measured,
        "extra_over_output_and_wgrad": (peak_measured - peak_ordinary)
        / (4 * (linear + tokens * widest)),
        "parameters": parameters,
    }


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median, by its ranks."""
    ranked = sorted(values)
    cut = max(0, math.floor((len(ranked) - 1.96 * math.sqrt(len(ranked))) / 2))
    return ranked[cut], ranked[-1 - cut]


def main(argv: list[str] | None = None) -> int:
    """Run, print a table, append a row of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=15, help="timed, of each kind")
    parser.add_argument("--microbatches", type=int, default=1, help="of an iteration")
    parser.add_argument(
        "--shape", choices=SHAPES, default="large" if has_gpu() else "small", help="of the model"
    )
    parser.add_argument("--output", type=Path, default=RESULTS / "refresh.jsonl", metavar="FILE")
    args = parser.parse_args(argv)
    shape = SHAPES[args.shape]
    heads = shape["hidden_size"] // 64
    values = {
        **shape,
        "num_attention_heads": heads,
        "num_query_groups": heads,
        "micro_batch_size": 4,
        "global_batch_size": 4 * args.microbatches,
        "bf16": True,
        "train_iters": WARM_UP_STEPS + 3 * (args.rounds + 2),
    }
    with open_lab(values) as lab, tempfile.TemporaryDirectory() as folder:
        lab.train(WARM_UP_STEPS)
        training = Training(lab, Path(folder))
        result = compare(lab, training, args.rounds)
        training.close()
    _show(result)
    # Rows without "measure" are of products.
    row = {"shape": args.shape, "microbatches": args.microbatches, "measure": "norms"}
    append_row(args.output, {**row, **result})
    return 0


def _show(result: dict[str, Any]) -> None:
    table = Table("quantity", "value")
    for name, value in result.items():
        table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    Console(width=100).print(table)


def _wait() -> None:
    if has_gpu():
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())

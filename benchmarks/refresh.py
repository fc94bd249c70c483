"""What a refresh costs: time over an ordinary iteration, bytes held between refreshes, peak memory.

    python -m benchmarks.refresh [--steps 5] [--probes 1] [--rows 512] [--shape small]

A BF16 Llama trains in this process. Ordinary iterations (forward, backward, optimizer) and
refreshes (both passes with fp8 and fp4 on offer, reduction, divergences) take turns on the same
microbatches; the ratio is of the medians (of CPU seconds on a CPU, one thread). Memory is counted
by torch's profiler on the CPU and by the allocator on a GPU; peaks are above what is held when the
iteration or the refresh begins.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # one core, whatever else the machine does

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from benchmarks.lab import Lab, on_gpu, open_lab
from benchmarks.machine import RESULTS, write_result
from megatron_snip.config import SnipConfig
from megatron_snip.divergence.quality import QualitySettings, divergence_table, problem_dict

SHAPES = {
    "small": {"num_layers": 4, "hidden_size": 256, "ffn_hidden_size": 512, "seq_length": 256},
    "wide": {"num_layers": 4, "hidden_size": 768, "ffn_hidden_size": 2048, "seq_length": 512},
    "deep": {"num_layers": 24, "hidden_size": 768, "ffn_hidden_size": 2048, "seq_length": 256},
    "large": {"num_layers": 8, "hidden_size": 2048, "ffn_hidden_size": 5632, "seq_length": 2048},
}
"""A microbatch is four sequences. What a refresh takes over an iteration and over a copy of the
gradients falls with the width and with the tokens of a microbatch, of which the probe compares a
fixed number."""


def refresh(lab: Lab, config: SnipConfig, microbatches: int) -> dict[str, Any]:
    """Measure on the step's microbatches and return the planner's problem."""
    table = lab.statistics(lab.microbatches(microbatches), config)
    quality = QualitySettings(
        config.options,
        config.lowest_format,
        config.loss_join,
        config.weight_join,
        config.weight_lambda,
    )
    divergences = divergence_table(table, quality)
    return problem_dict(divergences, config.lowest_format, config.efficiency_target)


def seconds(run: Callable[[], object]) -> float:
    """Return how long `run` takes, the device included; on the CPU the process's own time.

    The process's time does not count other programs on a busy machine.
    """
    _wait()
    clock = time.perf_counter if on_gpu() else time.process_time
    begin = clock()
    run()
    _wait()
    return clock() - begin


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the most memory that `run` holds above what was held when it began."""
    if on_gpu():
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


def compare(lab: Lab, config: SnipConfig, microbatches: int, rounds: int) -> dict[str, Any]:
    """Return times and memory of iterations and refreshes in turn."""

    def measure() -> None:
        refresh(lab, config, microbatches)

    def iterate() -> None:
        lab.train(1)

    iterate()
    measure()
    iterations, refreshes = [], []
    for _ in range(rounds):
        iterations.append(seconds(iterate))
        refreshes.append(seconds(measure))
    before = tensor_bytes()
    peak_refresh, peak_iteration = peak_bytes(measure), peak_bytes(iterate)
    held = tensor_bytes() - before
    parameters = sum(p.numel() for p in lab.state.runner.model[0].parameters())
    iteration, whole = statistics.median(iterations), statistics.median(refreshes)
    return {
        "iteration_s": iteration,
        "refresh_s": whole,
        "ratio": whole / iteration,
        "held_bytes": held,
        "held_share_of_parameters": held / (2 * parameters),
        "peak_iteration_bytes": peak_iteration,
        "peak_refresh_bytes": peak_refresh,
        "extra_peak_over_bf16_gradients": (peak_refresh - peak_iteration) / (2 * parameters),
        "parameters": parameters,
    }


def main(argv: list[str] | None = None) -> int:
    """Run, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=5, help="iterations and refreshes timed")
    parser.add_argument("--probes", type=int, default=1, help="probes that a refresh averages")
    rows = SnipConfig().probe_rows
    parser.add_argument("--rows", type=int, default=rows, help="tokens that the probe compares")
    parser.add_argument(
        "--shape", choices=SHAPES, default="large" if on_gpu() else "small", help="of the model"
    )
    parser.add_argument("--output", type=Path, default=RESULTS / "refresh.json", metavar="FILE")
    args = parser.parse_args(argv)
    shape = SHAPES[args.shape]
    heads = shape["hidden_size"] // 64
    values = {
        **shape,
        "num_attention_heads": heads,
        "num_query_groups": heads,
        "micro_batch_size": 4,
        "global_batch_size": 4,
        "bf16": True,
        "train_iters": 4 * args.steps + 16,
    }
    config = SnipConfig(formats=("fp8", "fp4"), probes=args.probes, probe_rows=args.rows)
    with open_lab(values) as lab:
        lab.train(3)
        result = compare(lab, config, 1, args.steps)
    _show(result)
    write_result(args.output, {"shape": shape, "probes": args.probes, "rows": args.rows, **result})
    return 0


def _show(result: dict[str, Any]) -> None:
    table = Table("quantity", "value")
    table.add_row("ordinary iteration", f"{result['iteration_s']:.3f} s")
    table.add_row("refresh", f"{result['refresh_s']:.3f} s")
    table.add_row("ratio", f"{result['ratio']:.2f}")
    table.add_row("held between refreshes", f"{result['held_bytes']} bytes")
    table.add_row("  share of parameter bytes", f"{result['held_share_of_parameters']:.5%}")
    table.add_row(
        "peak above start, iteration", f"{result['peak_iteration_bytes'] / 2**20:.1f} MiB"
    )
    table.add_row("peak above start, refresh", f"{result['peak_refresh_bytes'] / 2**20:.1f} MiB")
    extra = f"{result['extra_peak_over_bf16_gradients']:.2f}"
    table.add_row("  extra over a BF16 copy of the gradients", extra)
    Console(width=100).print(table)


def _wait() -> None:
    if on_gpu():
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())

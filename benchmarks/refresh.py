"""What a measured training iteration costs over an ordinary one: time, and peak memory.

    python -m benchmarks.refresh [--rounds 7] [--shape small] [--fraction 1.0] [--microbatches 1]

A BF16 Llama trains in this process. Ordinary iterations (forward, backward, optimizer) and measured
ones (all linears, or a part of them, with formats fp8 and fp4; reduction, divergences, problem)
alternate; the ratio is of the medians (of CPU seconds on a CPU, one thread). Memory is counted by
torch's profiler on the CPU and by the allocator on a GPU; peaks are above what is held when the
iteration begins.
"""

from __future__ import annotations

import argparse
import gc
import math
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
from megatron.core.pipeline_parallel import get_forward_backward_func
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from benchmarks.lab import Lab, open_lab
from benchmarks.machine import RESULTS, append_row, has_gpu
from megatron_snip.config import SnipConfig
from megatron_snip.divergence.quality_loss import (
    divergence_table,
    planning_problem,
)
from megatron_snip.run.step import zero_gradients

SHAPES = {
    "small": {"num_layers": 4, "hidden_size": 256, "ffn_hidden_size": 512, "seq_length": 256},
    "wide": {"num_layers": 4, "hidden_size": 768, "ffn_hidden_size": 2048, "seq_length": 512},
    "deep": {"num_layers": 24, "hidden_size": 768, "ffn_hidden_size": 2048, "seq_length": 256},
    "large": {"num_layers": 8, "hidden_size": 2048, "ffn_hidden_size": 5632, "seq_length": 2048},
}
"""A microbatch is four sequences."""


def iterate(lab: Lab, config: SnipConfig | None = None, part: int = 0) -> None:
    """Make one training iteration; measured if `config` is given."""
    batches = lab.microbatches(lab.config.global_batch_size // lab.config.micro_batch_size)
    arguments = lab.state.arguments([iter(batches)])
    zero_gradients(lab.state.model, lab.state.optimizer)
    if config is None:
        with lab.model.runtime.training_pass(lab.step + 1):
            get_forward_backward_func()(**arguments)
    else:
        linears = lab.model.all_linears
        stride = math.ceil(1 / config.measure_fraction - 1e-9)
        names = frozenset(linear.name for linear in linears[part % stride :: stride])
        table = lab.observed(arguments, config, names)
        lowest = config.lowest_format
        divergences = divergence_table(table, config.options, lowest, config, warn=False)
        planning_problem(divergences, 0.75)
    lab.state.optimizer.step()
    lab.step += 1


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


def compare(lab: Lab, config: SnipConfig, rounds: int) -> dict[str, Any]:
    """Return times and memory of ordinary and measured iterations that alternate."""
    iterate(lab)
    iterate(lab, config)
    ordinary, measured = [], []
    for part in range(rounds):
        ordinary.append(seconds(lambda: iterate(lab)))
        measured.append(seconds(lambda part=part: iterate(lab, config, part)))
    before = tensor_bytes()
    peak_measured = peak_bytes(lambda: iterate(lab, config))
    held = tensor_bytes() - before
    peak_ordinary = peak_bytes(lambda: iterate(lab))
    parameters = sum(p.numel() for p in lab.state.model[0].parameters())
    linear = max(i.in_features * i.out_features for i in lab.model.all_linears)
    tokens = lab.config.micro_batch_size * lab.config.seq_length
    widest = max(max(i.in_features, i.out_features) for i in lab.model.all_linears)
    medians = statistics.median(ordinary), statistics.median(measured)
    ratio = medians[1] / medians[0]

    return {
        "iteration_s": medians[0],
        "measured_s": medians[1],
        "ratio": ratio,
        "mean_ratio_at_interval_100": 1 + (ratio - 1) / config.measure_fraction / 100,
        "worst_ratio": max(measured) / medians[0],
        "held_share_of_parameters": held / (2 * parameters),
        "peak_iteration_bytes": peak_ordinary,
        "peak_measured_bytes": peak_measured,
        "extra_over_output_and_wgrad": (peak_measured - peak_ordinary)
        / (4 * (linear + tokens * widest)),
        "parameters": parameters,
    }


def main(argv: list[str] | None = None) -> int:
    """Run, print a table, append a row of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=7, help="iterations of each kind timed")
    parser.add_argument("--fraction", type=float, default=1.0, help="of linears measured at once")
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
        "train_iters": 4 * args.rounds + 16,
    }
    config = SnipConfig(formats=("fp8", "fp4"), measure_fraction=args.fraction)
    with open_lab(values) as lab:
        lab.train(3)
        result = compare(lab, config, args.rounds)
    _show(result)
    row = {"shape": args.shape, "fraction": args.fraction, "microbatches": args.microbatches}
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

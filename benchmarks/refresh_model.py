"""What a refresh costs at 64, 1,024 and 16,384 GPUs, modelled from pieces measured here.

    python -m benchmarks.refresh_model [--ratio 3.0] [--hop-latency 2e-5] [--output FILE]

Measured: the seconds that one exchange of the control plane takes between processes of this
machine (a network adds its latency: --hop-latency; a sum over all ranks takes log2(ranks)), and, by
benchmarks/refresh.py, the refresh over an iteration on the same microbatches (--ratio; the default
is the goal for GPUs with FP8 GEMMs, to be replaced by a measurement). Everything else is counted:
bytes of the reduced table, of the plan, of the row-parallel outputs, of the optimizer's
sensitivities, and how often ranks agree.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

from benchmarks.machine import RESULTS, write_result
from megatron_snip import butterfly
from megatron_snip.config import SnipConfig
from megatron_snip.statistics.reduce import row_width

FORMATS = 2
"""fp8 and fp4."""

AGREEMENTS = 14
"""Sums over all ranks in a refresh beside the table's: one decision after each of its phases."""

OPTION_BYTES = 85
"""Bytes of one linear in a plan's JSON: its name and three formats."""

NVLINK_BYTES_PER_S = 300e9
NETWORK_BYTES_PER_S = 40e9
"""Bus bandwidths that NCCL reaches within a node, and between nodes for one GPU's share."""


@dataclass(frozen=True)
class Job:
    """A pretraining job.

    Attributes:
        name: model.
        layers: transformer layers.
        linears: rows of the table.
        hidden, ffn: widths of the outputs of row-parallel linears and of fc1.
        parameters: in linears.
        active: of them, for one token.
        tensor, pipeline, data: parallel sizes.
        tokens: of one microbatch.
        microbatches: of one step, a data rank.
    """

    name: str
    layers: int
    linears: int
    hidden: int
    ffn: int
    parameters: float
    active: float
    tensor: int
    pipeline: int
    data: int
    tokens: int
    microbatches: int

    @property
    def gpus(self) -> int:
        """All of them."""
        return self.tensor * self.pipeline * self.data

    @property
    def step_s(self) -> float:
        """Seconds of a step, at 40 % of 990 TFLOP/s."""
        flops = 6 * self.active * self.tokens * self.microbatches * self.data
        return flops / (self.gpus * 0.4 * 990e12)


JOBS = (
    Job("Llama-7B", 32, 128, 4096, 11008, 6.5e9, 6.5e9, 2, 1, 32, 8192, 8),
    Job("Llama-70B", 80, 320, 8192, 28672, 68e9, 68e9, 8, 8, 16, 8192, 32),
    Job("MoE-1T", 128, 512, 8192, 28672, 1e12, 50e9, 8, 16, 128, 8192, 32),
)


def costs(job: Job, ratio: float, hop_s: float) -> dict[str, float]:
    """Return the bytes and seconds of one refresh."""
    table = job.linears * row_width(FORMATS) * 8
    rounds = math.ceil(math.log2(job.gpus))
    plan = job.linears * OPTION_BYTES
    # Pass A adds [1 + formats, tokens, hidden] FP32 of both row-parallel linears over the tensor
    # axis; a stage's sensitivities are added over the data axis once, in BF16.
    rows = 2 * job.layers / job.pipeline * (1 + FORMATS) * job.tokens * job.hidden * 4
    d = 2 * job.parameters / (job.tensor * job.pipeline)
    compute = ratio * job.step_s / job.microbatches * _pipeline(job)
    seconds = {
        "compute_s": compute,
        "row_outputs_s": 2 * rows / NVLINK_BYTES_PER_S,
        "sensitivities_s": 2 * d / NETWORK_BYTES_PER_S,
        "table_s": rounds * (hop_s + table / 1e9),
        "agreements_s": AGREEMENTS * rounds * hop_s,
        "plan_s": rounds * (hop_s + plan / 1e9),
        "guard_s": SnipConfig().guard_steps * 2 * rounds * hop_s,  # a loss and a flag a step
    }
    total = sum(seconds.values())
    return {
        "gpus": job.gpus,
        "step_s": job.step_s,
        "table_bytes": table,
        "plan_bytes": plan,
        "sensitivity_bytes_per_gpu": d,
        **seconds,
        "refresh_s": total,
        "refresh_steps": total / job.step_s,
        "share_at_interval_200": total / (200 * job.step_s),
    }


def _pipeline(job: Job) -> float:
    """One microbatch runs through all stages in turn, while a full step keeps them all busy."""
    return job.pipeline


def hop_seconds(ranks: int = 4, rounds: int = 2000) -> float:
    """Return the seconds of one exchange of a small sum, measured on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    processes = [
        context.Process(target=_sums, args=(rank, ranks, port, rounds, queue))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    return float(queue.get()) / math.log2(ranks)


def _sums(rank: int, ranks: int, port: int, rounds: int, queue: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    values, group = torch.zeros(64, dtype=torch.float64), dist.group.WORLD
    assert group is not None
    butterfly.all_reduce(values, group)
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        butterfly.all_reduce(values, group)
        seconds.append(time.perf_counter() - begin)
    if rank == 0:
        queue.put(min(seconds))  # what the machine's other work does not disturb
    dist.destroy_process_group()


def main(argv: list[str] | None = None) -> int:
    """Measure a hop, print the table, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--ratio", type=float, default=3.0, help="refresh over iteration")
    parser.add_argument("--hop-latency", type=float, default=2e-5, help="of the network, seconds")
    parser.add_argument("--output", type=Path, default=RESULTS / "refresh_model.json")
    args = parser.parse_args(argv)
    hop = hop_seconds()
    rows = {job.name: costs(job, args.ratio, hop + args.hop_latency) for job in JOBS}
    table = Table("quantity", *(f"{j.name}, {j.gpus:,} GPUs" for j in JOBS))
    for key in next(iter(rows.values())):
        cells = [rows[job.name][key] for job in JOBS]
        table.add_row(key, *(f"{c:,.0f}" if c >= 1000 else f"{c:.3g}" for c in cells))
    Console(width=110).print(table)
    result = {"hop_s": hop, "ratio": args.ratio, "hop_latency_s": args.hop_latency}
    write_result(args.output, {**result, "jobs": {j.name: asdict(j) for j in JOBS}, "costs": rows})
    print(json.dumps({"hop_s": hop}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

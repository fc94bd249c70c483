"""The sweep of block sizes: what an SM loads at once, and that all sizes give the same bits."""

from typing import Any

import pytest
import torch

from benchmarks.columns import CONFIGS, KINDS, bytes_in_flight, measure
from megatron_snip.kernels import launch


@pytest.mark.parametrize(
    ("registers", "warps", "shared", "elements", "kilobytes"),
    [
        (74, 8, 0, 32, 48),  # 80 registers of 256 threads: 3 blocks
        (60, 4, 0, 32, 64),  # 8 blocks of 128 threads
        (128, 4, 0, 64, 64),
        (32, 2, 0, 8, 32),  # 32 blocks, not the 64 warps
        (128, 4, 120 * 1024, 64, 16),  # one block fits into shared memory
    ],
)
def test_bytes_in_flight(
    registers: int, warps: int, shared: int, elements: float, kilobytes: int
) -> None:
    assert bytes_in_flight(registers, warps, shared, elements) == 1024 * kilobytes


def test_what_runs_is_in_the_sweep() -> None:
    assert len(set(CONFIGS)) == len(CONFIGS) and len(KINDS) == 3
    assert {launch.COL_CONFIG, launch.COL_RANDOM_CONFIG} <= set(CONFIGS)
    assert all(config.rows == 128 for config in CONFIGS)  # complete tiles


def test_the_timed_sweep_names_what_differs_and_what_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its logic alone: the kernels themselves are for GPUs, on which it was not run yet."""

    def quantize(x: torch.Tensor, fmt: Any, *_: Any, config: Any, **__: Any) -> torch.Tensor:
        if config == CONFIGS[3] and len(x) == 64:
            raise RuntimeError("out of registers")
        return x + 1.0 if config == CONFIGS[2] and fmt.name == "fp8" else x.clone()

    monkeypatch.setattr(launch, "quantize_dequantize", quantize)
    report = measure(torch.device("cpu"), (64, 32), 2)
    assert report["bits_differ"] == ["fp8, 128x64, 8 warps"]
    assert len(report["failures"]) == len(KINDS)
    assert len(report["copy_fraction"]) == 1 + len(KINDS) * (len(CONFIGS) - 1)
    assert report["best"].keys() == KINDS.keys() and set(report["best"].values()) <= set(CONFIGS)

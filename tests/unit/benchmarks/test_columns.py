"""The sweep of block sizes: what an SM loads at once, and that all sizes give the same bits."""

import pytest

from benchmarks.columns import CONFIGS, KINDS, bytes_in_flight
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

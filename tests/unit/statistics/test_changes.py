"""What the probe changed: squares shared out over shards, averaged, and told from rounding."""

from __future__ import annotations

import pytest
import torch

from megatron_snip.statistics.changes import take_changes
from megatron_snip.statistics.observation import Observation, ProbedRows
from megatron_snip.topology import Placement, TensorAxis
from tests.unit.statistics.test_probe import PLACEMENT, observation


def probed(x: torch.Tensor, g: torch.Tensor, dx: float, dg: float) -> Observation:
    seen = observation(x, g, torch.arange(len(x)))
    seen.probed = ProbedRows(x + dx, g + dg)
    return seen


def test_changes_and_their_squares_shared_out() -> None:
    x, g = torch.randn(3, 64), torch.randn(3, 48)
    seen = probed(x, g, dx=0.5, dg=2.0)
    changes = take_changes(PLACEMENT, seen)
    torch.testing.assert_close(changes.input, torch.full((3, 64), 0.5))
    torch.testing.assert_close(changes.grad, torch.full((3, 48), 2.0))
    assert changes.input_noise is None and changes.grad_noise is None  # FP32
    assert seen.probe.tolist() == pytest.approx([3 * 64 * 0.25, 0, 3 * 48 * 4.0, 0], rel=1e-4)
    axis = TensorAxis(rank=0, size=2)  # G of a row-parallel linear is on both ranks
    seen = probed(x, g, 0.5, 2.0)
    take_changes(Placement("l", 0, "row", 128, 48, axis), seen)
    assert seen.probe.tolist() == pytest.approx([3 * 64 * 0.25, 0, 3 * 48 * 2.0, 0], rel=1e-4)
    seen = probed(x, g, 0.5, 2.0)
    take_changes(Placement("l", 0, "column", 64, 96, axis), seen)
    assert seen.probe.tolist() == pytest.approx([3 * 32 * 0.25, 0, 3 * 48 * 4.0, 0], rel=1e-4)


def test_squares_are_averaged_over_probes() -> None:
    x, g = torch.randn(3, 64), torch.randn(3, 48)
    seen = observation(x, g, torch.arange(3))
    for change in (1.0, 3.0):
        seen.probed = ProbedRows(x + change, g)
        take_changes(PLACEMENT, seen, num_probes=2)
    assert seen.probe[0].item() == pytest.approx(3 * 64 * (1.0 + 9.0) / 2, rel=1e-4)


def test_bf16_rounding_alone_is_told_from_change() -> None:
    """The noise is what two roundings of the same value differ by on average."""
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn((10, 4096), generator=generator)
    noise = torch.randn((10, 4096), generator=generator) * 2.0**-5
    rounded, far = exact.to(torch.bfloat16), (exact + noise).to(torch.bfloat16)
    seen = observation(rounded, torch.zeros((10, 8), dtype=torch.bfloat16), torch.arange(10))
    seen.probed = ProbedRows(far, torch.zeros((10, 8), dtype=torch.bfloat16))
    changes = take_changes(Placement("l", 0, "column", 4096, 8), seen)
    wanted = noise.double().square().sum().item()
    change, rounding = seen.probe[:2].tolist()
    assert change - rounding == pytest.approx(wanted, rel=0.01)
    assert change == pytest.approx(wanted + rounding, rel=0.01)
    assert rounding > 0.003 * wanted  # or this test would see nothing
    assert changes.grad_noise is not None
    assert changes.grad_noise.abs().max() == 0  # 0 is exact

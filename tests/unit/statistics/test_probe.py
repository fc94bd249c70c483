"""Pass B's pieces: the step, the perturbation and its undoing, and the comparison of rows."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_snip.statistics.observation import Observation
from megatron_snip.statistics.probe import Comparer, ProbedWeight, perturb, probe_step, restore
from megatron_snip.streams import random_signs
from megatron_snip.topology import Placement, TensorAxis

PLACEMENT = Placement("decoder.layers.0.mlp.linear_fc2", 0, "row", 64, 48)


def probed(dtype: torch.dtype) -> ProbedWeight:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((48, 64), generator=generator).to(dtype)
    d = torch.rand((48, 64), generator=generator).add_(0.5).to(dtype)
    return ProbedWeight(PLACEMENT, weight, d, update_norm=3.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_moves_by_eps_d_r_and_comes_back_bitwise(dtype: torch.dtype) -> None:
    one = probed(dtype)
    before, d = one.weight.clone(), one.buffer.clone()
    share = perturb(one, eps=0.3, seed=5, step=2)
    signs = random_signs(5, PLACEMENT, 2)
    wanted = before.double() + 0.3 * d.double() * signs.double() / 3.0
    tolerance = {"rtol": torch.finfo(dtype).eps, "atol": 1e-7}
    torch.testing.assert_close(one.weight.double(), wanted, **tolerance)
    assert share == pytest.approx(1.0, abs=1e-5 if dtype == torch.float32 else 0.02)
    restore(one)
    assert torch.equal(one.weight, before)
    restore(one)  # nothing left to undo
    assert torch.equal(one.weight, before)


def test_a_weight_that_was_not_perturbed_is_not_restored() -> None:
    one = probed(torch.float32)
    before = one.weight.clone()
    restore(one)  # the buffer holds D, not the weight
    assert torch.equal(one.weight, before)


def test_rounding_that_swallows_the_step_shows() -> None:
    one = probed(torch.bfloat16)
    assert perturb(one, eps=1e-5, seed=0, step=0) < 0.2


def test_the_step_is_relative_to_all_weights() -> None:
    assert probe_step(0.01, weight_square=4.0, direction_square=16.0) == pytest.approx(0.005)


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
def test_a_probe_without_a_direction_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="finite, nonzero"):
        probe_step(0.01, bad, 1.0)
    with pytest.raises(ValueError, match="finite, nonzero"):
        probe_step(0.01, 1.0, bad)


def observation(x: torch.Tensor, g: torch.Tensor, rows: torch.Tensor) -> Observation:
    empty = torch.zeros(0, dtype=torch.float64)
    return Observation(0, rows, empty, empty, empty, empty, empty, empty, x[rows], g[rows])


def compared(
    placement: Placement, x: torch.Tensor, g: torch.Tensor, dx: float, dg: float
) -> Observation:
    """Compare x, g with a pass in which they were dx and dg larger."""
    rows = torch.tensor([0, 2, 9])
    seen = observation(x, g, rows)
    comparer = Comparer({placement.instance: [seen]})
    w = torch.zeros((g.shape[1], x.shape[1]), dtype=x.dtype, requires_grad=True)
    y = comparer.observe(placement, x + dx, w, x @ w.t(), sequence_parallel=False)
    y.backward(g + dg)
    assert comparer.failure is None
    return seen


def test_changes_of_the_sampled_rows_are_squared_and_shared() -> None:
    x, g = torch.randn(10, 64), torch.randn(10, 48)
    seen = compared(PLACEMENT, x, g, dx=0.5, dg=2.0)
    assert seen.probe_input is not None and seen.probe_grad is not None
    assert seen.probe_input.tolist() == pytest.approx([64 * 0.25] * 3, rel=1e-4)
    assert seen.probe_grad.tolist() == pytest.approx([48 * 4.0] * 3, rel=1e-4)
    assert seen.input_rows is None and seen.grad_rows is None  # memory is given back
    axis = TensorAxis(rank=0, size=2)  # G of a row-parallel linear is on both ranks
    seen = compared(Placement("l", 0, "row", 128, 48, axis), x, g, 0.5, 2.0)
    assert seen.probe_input is not None and seen.probe_grad is not None
    assert seen.probe_input.tolist() == pytest.approx([64 * 0.25] * 3, rel=1e-4)
    assert seen.probe_grad.tolist() == pytest.approx([48 * 2.0] * 3, rel=1e-4)


def test_bf16_rounding_alone_is_no_change() -> None:
    """The floor is what two roundings of the same value differ by on average."""
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn((10, 4096), generator=generator)
    noise = torch.randn((10, 4096), generator=generator) * 2.0**-5
    rounded = exact.to(torch.bfloat16)
    far = (exact + noise).to(torch.bfloat16)
    rows = torch.arange(10)
    placement = Placement("l", 0, "column", 4096, 8)
    seen = observation(rounded, torch.zeros((10, 8), dtype=torch.bfloat16), rows)
    comparer = Comparer({"l": [seen]})
    w = torch.zeros((8, 4096), dtype=torch.bfloat16, requires_grad=True)
    y = comparer.observe(placement, far, w, far @ w.t(), sequence_parallel=False)
    y.backward(torch.zeros_like(y))
    assert seen.probe_input is not None
    wanted = noise.double().square().sum(1)
    assert (seen.probe_input / wanted).mean().item() == pytest.approx(1.0, abs=0.01)


def test_a_failure_is_noted() -> None:
    comparer = Comparer({})
    x, w = torch.randn(3, 4), torch.zeros((2, 4), requires_grad=True)
    comparer.observe(PLACEMENT, x, w, x @ w.t(), sequence_parallel=False).sum().backward()
    assert comparer.failure is not None
    assert comparer.failure.startswith(f"{PLACEMENT.name}: KeyError")

"""Pass B's pieces: the step, the perturbation and its undoing, and the comparison of rows."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_snip.statistics.observation import Observation, SampledRows
from megatron_snip.statistics.probe import Comparer, ProbedWeight, perturb, probe_step, restore
from megatron_snip.streams import random_signs
from megatron_snip.topology import Placement

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
    applied, intended = perturb(one, eps=0.3, seed=5, step=2)
    signs = random_signs(5, PLACEMENT, 2)
    wanted = before.double() + 0.3 * d.double() * signs.double() / 3.0
    tolerance = {"rtol": torch.finfo(dtype).eps, "atol": 1e-7}
    torch.testing.assert_close(one.weight.double(), wanted, **tolerance)
    assert intended == pytest.approx((0.3 * d.double() / 3.0).square().sum().item(), rel=1e-5)
    assert applied / intended == pytest.approx(1.0, abs=1e-5 if dtype == torch.float32 else 0.02)
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
    applied, intended = perturb(one, eps=1e-5, seed=0, step=0)
    assert applied < 0.2 * intended


def test_every_probe_draws_its_own_signs() -> None:
    changes = []
    for draw in (0, 1, 0):
        one = probed(torch.float32)
        before = one.weight.clone()
        perturb(one, eps=0.3, seed=5, step=2, draw=draw)
        changes.append(one.weight - before)
    assert torch.equal(changes[0], changes[2])
    assert 0.4 < (changes[0].sign() == changes[1].sign()).float().mean() < 0.6


def test_the_step_is_relative_to_all_weights() -> None:
    assert probe_step(0.01, weight_square=4.0, direction_square=16.0) == pytest.approx(0.005)


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
def test_a_probe_without_a_direction_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="finite, nonzero"):
        probe_step(0.01, bad, 1.0)
    with pytest.raises(ValueError, match="finite, nonzero"):
        probe_step(0.01, 1.0, bad)


def observation(x: torch.Tensor, g: torch.Tensor, rows: torch.Tensor) -> Observation:
    def empty(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.float64)

    return Observation(
        microbatch=0,
        rows=rows,
        first=empty(0, len(x)),
        norms=empty(5),
        errors=empty(0, 6),
        output_error=empty(0, len(x)),
        grad=empty(len(x)),
        couplings=empty(0, 3, 2),
        scalings=empty(2, 2),
        sketches=empty(2, 64),
        wgrad=empty(64),
        probe=empty(4),
        sampled=SampledRows(x[rows], g[rows]),
    )


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


def test_the_sampled_rows_are_kept() -> None:
    x, g = torch.randn(10, 64), torch.randn(10, 48)
    seen = compared(PLACEMENT, x, g, dx=0.5, dg=2.0)
    assert seen.probed is not None
    assert torch.equal(seen.probed.input, (x + 0.5)[[0, 2, 9]])
    assert torch.equal(seen.probed.grad, (g + 2.0)[[0, 2, 9]])
    assert seen.probed.grad.untyped_storage().nbytes() == 3 * 48 * 4  # not a view of all of G
    assert seen.probe.tolist() == [0.0] * 4  # left to `take_changes`


def test_an_expert_that_was_sent_other_tokens_is_not_compared() -> None:
    x, g = torch.randn(10, 64), torch.randn(10, 48)
    seen = observation(x, g, torch.tensor([0, 2, 9]))
    comparer = Comparer({PLACEMENT.instance: [seen]})
    w = torch.zeros((48, 64), requires_grad=True)
    y = comparer.observe(PLACEMENT, x[:7], w, x[:7] @ w.t(), sequence_parallel=False)
    y.backward(g[:7])
    assert comparer.failure is None
    assert seen.probed is None


def test_a_failure_is_noted() -> None:
    comparer = Comparer({})
    x, w = torch.randn(3, 4), torch.zeros((2, 4), requires_grad=True)
    comparer.observe(PLACEMENT, x, w, x @ w.t(), sequence_parallel=False).sum().backward()
    assert comparer.failure is not None
    assert comparer.failure.startswith(f"{PLACEMENT.name}: KeyError")

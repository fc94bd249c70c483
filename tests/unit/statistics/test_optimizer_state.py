"""D and the update, against the real AdamW; optimizers of every make, by their attributes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from megatron_snip.statistics.optimizer_state import AdamShard, adam_shards

BETAS, EPS = (0.9, 0.95), 1e-8


def trained(
    steps: int, shape: tuple[int, ...] = (6, 4)
) -> tuple[torch.nn.Parameter, torch.optim.AdamW, torch.Tensor]:
    """A parameter after `steps` of AdamW (lr 1), its optimizer and the last update made."""
    generator = torch.Generator().manual_seed(0)
    param = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    optimizer = torch.optim.AdamW([param], 1.0, BETAS, EPS, weight_decay=0.0)
    before = param.detach().clone()
    for _ in range(steps):
        before = param.detach().clone()
        param.grad = torch.randn(shape, generator=generator, dtype=torch.float64)
        optimizer.step()
    return param, optimizer, before - param.detach()


def next_update(param: torch.nn.Parameter, optimizer: Any, grad: torch.Tensor) -> torch.Tensor:
    """What the optimizer would subtract from the parameter for this gradient."""
    twin, again = copy.deepcopy((param, optimizer))
    (twin,) = again.param_groups[0]["params"]
    before = twin.detach().clone()
    twin.grad = grad
    again.step()
    return before - twin.detach()


@pytest.mark.parametrize("steps", [1, 2, 7, 40])
def test_d_is_the_slope_of_the_real_update(steps: int) -> None:
    """D leaves out that g moves v as well: around g = 0 only v's decay is between the two."""
    param, optimizer, _ = trained(steps)
    h = 1e-6
    up, down = (next_update(param, optimizer, torch.full_like(param, s * h)) for s in (1, -1))
    slope = ((up - down) / (2 * h)).flatten()
    d = adam_shards(optimizer)[param].sensitivity()
    assert d is not None
    beta2 = BETAS[1]
    decay = (beta2 * (1 - beta2**steps) / (1 - beta2 ** (steps + 1))) ** 0.5
    torch.testing.assert_close(d.double(), slope * decay, rtol=1e-4, atol=0)


@pytest.mark.parametrize("steps", [1, 5])
def test_the_update_is_the_one_last_made(steps: int) -> None:
    _, optimizer, made = trained(steps)
    ((param, shard),) = adam_shards(optimizer).items()
    update = shard.update()
    assert update is not None
    assert (shard.start, shard.end, shard.step) == (0, param.numel(), steps)
    torch.testing.assert_close(update.double(), made.flatten(), rtol=1e-5, atol=1e-7)


def test_no_moments_no_sensitivity() -> None:
    param, optimizer, _ = trained(0)
    shard = adam_shards(optimizer)[param]
    assert shard.sensitivity() is None
    assert shard.update() is None
    param.grad = torch.ones_like(param)
    for momentum in (0.0, 0.9):
        sgd = torch.optim.SGD([param], lr=0.1, momentum=momentum)
        sgd.step()
        assert adam_shards(sgd)[param].sensitivity() is None


def test_a_second_moment_of_zero_stays_finite() -> None:
    """A row of an embedding that no token has touched: D is large, not infinite."""
    shard = AdamShard(0, 2, torch.zeros(2), torch.tensor([0.0, 1e-45]), 3, BETAS, EPS)
    d, update = shard.sensitivity(), shard.update()
    assert d is not None and update is not None
    assert d.isfinite().all() and update.isfinite().all()


def test_the_state_of_fused_adam_counts_steps_in_the_group() -> None:
    param, optimizer, _ = trained(4)
    wanted = adam_shards(optimizer)[param]
    for state in optimizer.state.values():
        del state["step"]
    optimizer.param_groups[0]["step"] = 4
    found = adam_shards(optimizer)[param]
    assert found.step == 4
    assert torch.equal(found.sensitivity(), wanted.sensitivity())  # type: ignore[arg-type]
    optimizer.param_groups[0]["step"] = torch.tensor(4, dtype=torch.int32)  # capturable
    assert adam_shards(optimizer)[param].step == 4

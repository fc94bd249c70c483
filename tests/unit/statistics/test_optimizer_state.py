"""D and the update, against the real AdamW; optimizers of every make; D in factors."""

import copy
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

from megatron_snip.log import forget_warnings
from megatron_snip.patches import cpu
from megatron_snip.statistics.optimizer_state import (
    Shard,
    is_sharded,
    learning_rate,
    optimizer_shards,
    steps_of_moments,
)
from megatron_snip.statistics.sensitivity import ShardSums, gather_sensitivities, weight_norms
from megatron_snip.topology import Axis, Placement, Topology
from tests.models import alone

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


def d_and_update(shard: Shard) -> tuple[torch.Tensor, torch.Tensor]:
    found = shard.inverse_d_and_update()
    assert found is not None
    return 1.0 / found[0], found[1]


@pytest.mark.parametrize("is_chained", [False, True])
def test_a_rank_without_trainable_parameters_has_no_state(is_chained: bool) -> None:
    """A frozen tower on a pipeline stage of its own: Megatron makes optimizers of nothing."""
    config = OptimizerConfig(optimizer="adam", lr=1e-3, bf16=True)
    with alone("gloo"), ExitStack() as stack:
        cpu.install()
        stack.callback(cpu.uninstall)
        stubs: list[Any] = [Float16OptimizerWithFloat16Params(None, config, None, None)]
        chained = [ChainedOptimizer(stubs), ChainedOptimizer([])]
    for optimizer in chained if is_chained else stubs:
        assert optimizer_shards(optimizer) == {}
        assert steps_of_moments(optimizer) is None
        assert learning_rate(optimizer) is None
        assert not is_sharded(optimizer)


def next_update(param: torch.nn.Parameter, optimizer: Any, grad: torch.Tensor) -> torch.Tensor:
    """What the optimizer would subtract from the parameter for this gradient."""
    twin, again = copy.deepcopy((param, optimizer))
    (twin,) = again.param_groups[0]["params"]
    before = twin.detach().clone()
    twin.grad = grad
    again.step()
    return before - twin.detach()


@pytest.mark.parametrize("steps", [1, 2, 7, 40])
def test_d_is_the_slope_of_the_real_update_and_the_update_the_one_last_made(steps: int) -> None:
    """D leaves out that g moves v as well: around g = 0 only v's decay is between the two."""
    param, optimizer, made = trained(steps)
    h = 1e-6
    up, down = (next_update(param, optimizer, torch.full_like(param, s * h)) for s in (1, -1))
    slope = ((up - down) / (2 * h)).flatten()
    shard = optimizer_shards(optimizer)[param]
    assert (shard.start, shard.end, shard.step) == (0, param.numel(), steps)
    d, update = d_and_update(shard)
    torch.testing.assert_close(update.double(), made.flatten(), rtol=1e-5, atol=1e-7)
    beta2 = BETAS[1]
    decay = (beta2 * (1 - beta2**steps) / (1 - beta2 ** (steps + 1))) ** 0.5
    torch.testing.assert_close(d.double(), slope * decay, rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("name", "options", "tolerance"),
    [
        ("SGD", {"momentum": 0.9, "dampening": 0.5}, 1e-5),
        ("SGD", {"momentum": 0.9, "nesterov": True}, 1e-5),
        ("Muon", {"nesterov": False}, 0.3),  # one random direction stands for all
        ("Muon", {"nesterov": True}, 0.3),
    ],
)
def test_d_over_the_update_is_that_of_the_real_step(
    name: str, options: dict[str, Any], tolerance: float
) -> None:
    """A random change of the gradient, against the change of what PyTorch's optimizer does."""
    generator = torch.Generator().manual_seed(1)
    scales = torch.exp2(torch.linspace(-2.0, 2.0, 48))[:, None]  # rows with other gradients

    def draw(rows: int = 48) -> torch.Tensor:
        return torch.randn((rows, 32), generator=generator)

    for rows in (48, 24):
        param = torch.nn.Parameter(draw(rows))
        optimizer = getattr(torch.optim, name)([param], lr=1.0, weight_decay=0.0, **options)
        for _ in range(12):
            param.grad = scales[:rows] * draw(rows)
            optimizer.step()
        grad, (shard,) = scales[:rows] * draw(rows), optimizer_shards(optimizer).values()
        step = next_update(param, optimizer, grad)
        d, update = d_and_update(shard)
        sizes = []
        for _ in range(5):
            change = 0.1 * scales[:rows] * draw(rows)  # as large as the errors of FP4
            moved = next_update(param, optimizer, grad + change) - step
            predicted = (d.view_as(change) * change).norm() / update.norm()
            sizes.append((predicted / (moved.norm() / step.norm())).item())
        if name == "SGD":  # `update` is the last one made, and this is the next
            sizes = [size * (update.norm() / step.norm()).item() for size in sizes]
        assert sizes == pytest.approx([1.0] * 5, rel=tolerance), sizes


@pytest.mark.parametrize("has_shapes", ["optimizer", "parameter"])
def test_muon_of_megatron_orthogonalizes_queries_keys_and_values_one_by_one(
    has_shapes: str,
) -> None:
    """Two query groups, each of 4 rows of queries, 2 of keys and 3 of values."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.tensor([0] * 4 + [1] * 2 + [2] * 3).repeat(2)
    qkv = torch.nn.Parameter(torch.zeros(len(rows), 8))
    grad = torch.randn(qkv.shape, generator=generator)
    parts = [torch.nn.Parameter(qkv.detach()[rows == i]) for i in range(3)]
    other = torch.nn.Parameter(torch.zeros_like(qkv))
    optimizer: Any = torch.optim.Muon([qkv, *parts, other], lr=1.0)
    optimizer.split_qkv = True
    optimizer.qkv_split_shapes = [4, 2, 3] if has_shapes == "optimizer" else None
    if has_shapes == "parameter":
        qkv.qkv_split_shapes = [4, 2, 3]  # type: ignore[attr-defined]
    optimizer.is_qkv_fn = lambda param: param is qkv
    qkv.grad = other.grad = grad
    for i, each in enumerate(parts):
        each.grad = grad[rows == i]
    optimizer.step()
    shards = optimizer_shards(optimizer)
    update = d_and_update(shards[qkv])[1].view_as(qkv)
    for i, each in enumerate(parts):
        wanted = d_and_update(shards[each])[1].view_as(each)
        torch.testing.assert_close(update[rows == i], wanted, rtol=1e-4, atol=1e-5)
    together = d_and_update(shards[other])[1].view_as(qkv)
    assert not torch.allclose(update, together, atol=0.1)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop"])
def test_without_moments_or_of_an_unknown_optimizer_there_is_no_sensitivity(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    param = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = getattr(torch.optim, name)([param], lr=0.1)
    if name != "AdamW":
        param.grad = torch.ones(3, 2)
        optimizer.step()
    for _ in range(2):
        assert optimizer_shards(optimizer)[param].inverse_d_and_update() is None
    assert caplog.text.count("optimizer RMSprop is not known") == (name == "RMSprop")


@pytest.mark.parametrize("name", ["GG", "Q_L"])
def test_moments_in_another_basis_are_not_those_of_adamw(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """SOAP has `exp_avg` and `exp_avg_sq` too, of the gradient in an eigenbasis."""
    forget_warnings()
    param, optimizer, _ = trained(3)
    optimizer.state[param][name] = torch.eye(6)
    shard = optimizer_shards(optimizer)[param]
    assert shard.inverse_d_and_update() is None
    assert steps_of_moments(optimizer) is None
    assert "optimizer AdamW is not known" in caplog.text


def test_muon_may_have_nesterov_as_an_attribute() -> None:
    """As in newer versions of the package that Megatron takes it from."""
    param = torch.nn.Parameter(torch.ones(8, 4))
    optimizer: Any = torch.optim.Muon([param], momentum=0.9, nesterov=True)
    param.grad = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    wanted, _ = d_and_update(optimizer_shards(optimizer)[param])
    del optimizer.param_groups[0]["nesterov"]
    without, _ = d_and_update(optimizer_shards(optimizer)[param])
    torch.testing.assert_close(wanted, 1.9 * without)
    optimizer.nesterov = True
    assert torch.equal(d_and_update(optimizer_shards(optimizer)[param])[0], wanted)


def test_a_second_moment_of_zero_stays_finite() -> None:
    """A row of an embedding that no token has touched: D is large, not infinite."""
    param, optimizer, _ = trained(3, shape=(1, 2))
    moments = {"exp_avg": torch.zeros(1, 2), "exp_avg_sq": torch.tensor([[0.0, 1e-45]])}
    optimizer.state[param].update(moments)
    d, update = d_and_update(optimizer_shards(optimizer)[param])
    assert d.isfinite().all() and update.isfinite().all()


def test_offloaded_moments_come_to_the_device_of_the_weight() -> None:
    """`--optimizer-cpu-offload`; `meta` stands for a GPU."""
    param, optimizer, _ = trained(3)
    shard = replace(optimizer_shards(optimizer)[param], parameter=param.to("meta"))
    assert {x.device.type for x in d_and_update(shard)} == {"meta"}


def test_the_state_of_fused_adam_counts_steps_in_the_group() -> None:
    param, optimizer, _ = trained(4)
    wanted = optimizer_shards(optimizer)[param]
    for state in optimizer.state.values():
        del state["step"]
    optimizer.param_groups[0]["step"] = 4
    found = optimizer_shards(optimizer)[param]
    assert found.step == 4
    assert torch.equal(d_and_update(found)[0], d_and_update(wanted)[0])
    optimizer.param_groups[0]["betas"] += (0.5,)  # of optimizers with a third decay rate
    assert torch.equal(d_and_update(found)[0], d_and_update(wanted)[0])
    optimizer.param_groups[0]["step"] = torch.tensor(4, dtype=torch.int32)  # capturable
    assert optimizer_shards(optimizer)[param].step == 4


ROWS, COLS, STEP = 6, 4, 5


def weight_and_shard(separable: bool) -> tuple[torch.nn.Parameter, Shard]:
    """A weight, and what an AdamW without epsilon keeps of it after some steps."""
    g = torch.Generator().manual_seed(3)
    second = torch.rand(ROWS, 1, generator=g) * torch.rand(1, COLS, generator=g)
    if not separable:
        second = torch.rand(ROWS, COLS, generator=g)
    weight = torch.nn.Parameter(torch.zeros(ROWS, COLS))
    optimizer = torch.optim.AdamW([weight], betas=BETAS, eps=0.0)
    moments = {"exp_avg": torch.randn(ROWS * COLS, generator=g), "exp_avg_sq": second.reshape(-1)}
    optimizer.state[weight] = {"step": STEP, **moments}
    return weight, optimizer_shards(optimizer)[weight]


def gathered(monkeypatch: pytest.MonkeyPatch, weight: torch.nn.Parameter, *shards: Shard) -> Any:
    """Add the sums of several ranks' shards, as a distributed optimizer's data ranks do."""
    parts = [ShardSums.of(weight, each) for each in shards]
    total = ShardSums(*(sum(tensors) for tensors in zip(*parts, strict=True)))
    monkeypatch.setattr(ShardSums, "of", lambda *_: total)
    place = Placement("fc1", 0, "column", COLS, ROWS)
    return gather_sensitivities({place: weight}, torch.optim.SGD([weight]), Topology()).get(place)


def part(shard: Shard, start: int, end: int) -> Shard:
    state = {k: v[start:end] if k != "step" else v for k, v in shard.state.items()}
    return replace(shard, start=start, end=end, state=state)


@pytest.mark.parametrize("cuts", [[], [8], [3, 9, 10, 17], [1, 2, 3], [23]])
def test_a_separable_second_moment_gives_d_exactly_from_any_ranges(
    monkeypatch: pytest.MonkeyPatch, cuts: list[int]
) -> None:
    weight, shard = weight_and_shard(separable=True)
    d, update = d_and_update(shard)
    parts = [part(shard, a, b) for a, b in pairwise([0, *cuts, ROWS * COLS])]
    found = gathered(monkeypatch, weight, *parts)
    wanted = d.view(ROWS, COLS)
    torch.testing.assert_close(found.row[:, None] * found.col, wanted, rtol=1e-5, atol=0)
    assert found.update_square == pytest.approx(float(update.square().sum()), rel=1e-5)


def test_factors_keep_the_sums_of_rows_and_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, shard = weight_and_shard(separable=False)
    found = gathered(monkeypatch, weight, shard)
    inverse = 1 / (found.row[:, None] * found.col).square()
    wanted = d_and_update(shard)[0].view(ROWS, COLS) ** -2
    for dim in (0, 1):
        torch.testing.assert_close(inverse.sum(dim), wanted.sum(dim), rtol=1e-5, atol=0)


def test_a_weight_without_all_moments_has_no_sensitivity(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, shard = weight_and_shard(separable=True)
    for partial in (part(shard, 0, 20), replace(shard, state={})):
        with monkeypatch.context() as patch:
            assert gathered(patch, weight, partial) is None


@pytest.mark.parametrize("other_rate", [1e-3, 1e-1])
def test_the_step_is_that_of_the_weights_own_learning_rate(other_rate: float) -> None:
    """`--decoupled-lr`: the embedding, in another parameter group, has another rate."""
    generator = torch.Generator().manual_seed(5)
    weight, embedding = (torch.nn.Parameter(torch.ones(ROWS, COLS)) for _ in range(2))
    groups = [{"params": [weight], "lr": 1e-2}, {"params": [embedding], "lr": other_rate}]
    optimizer = torch.optim.AdamW(groups, betas=BETAS, weight_decay=0.0)
    before = weight.detach().clone()
    for _ in range(STEP):
        before = weight.detach().clone()
        for param in (weight, embedding):
            param.grad = torch.randn(ROWS, COLS, generator=generator)
        optimizer.step()
    made = float((weight.detach() - before).double().square().sum())
    place = Placement("fc1", 0, "column", COLS, ROWS)
    found = gather_sensitivities({place: weight}, optimizer, Topology())
    norms = weight_norms({place: weight}, optimizer, found, Topology(), loss_scale=1.0)
    assert norms["fc1"][1].item() == pytest.approx(made, rel=1e-4)


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_the_step_counts_once_over_ranges_replicas_and_ranks(
    monkeypatch: pytest.MonkeyPatch, num_replicas: int
) -> None:
    weight, shard = weight_and_shard(separable=False)
    shard = replace(shard, group={**shard.group, "lr": 0.5})
    ranges = [part(shard, 0, 9), part(shard, 9, 24)]
    found = gathered(monkeypatch, weight, *ranges * num_replicas)
    wanted = 0.25 * float(d_and_update(shard)[1].square().sum())
    assert found.num_replicas == num_replicas
    total = 0.0
    optimizer = torch.optim.SGD([weight], lr=7.0)  # its rate is not that of the shard
    for rank, tensor in ((0, 0), (1, 0), (0, 1), (1, 1)):
        place = Placement("fc1", 0, "column", COLS, ROWS, Axis(tensor, 2))
        topology = Topology(tp=place.tp, data=Axis(rank, 2))
        norms = weight_norms({place: weight}, optimizer, {place: found}, topology, 1.0)
        total += norms["fc1"][1].item()
    assert total == pytest.approx(wanted, rel=1e-5)

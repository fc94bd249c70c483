"""Norms of gradients: which elements a rank owns under optimizers of every make."""

import math
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

from megatron_snip.patches import cpu
from megatron_snip.statistics.gradients import gradient_norms, is_sharded, owned_elements
from megatron_snip.topology import Axis, Placement, Topology
from tests.models import alone

ROWS, COLS = 6, 4


def weight_with_gradient() -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.zeros(ROWS, COLS))
    weight.grad = torch.arange(1.0, 1.0 + ROWS * COLS).view(ROWS, COLS)
    return weight


def distributed(weight: torch.nn.Parameter, start: int, end: int) -> Any:
    """What is read of Megatron's DistributedOptimizer on a rank that owns a range."""
    owned = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(
        optimizer=SimpleNamespace(param_groups=[]),
        model_param_group_index_map={weight: (0, 0)},
        _get_model_param_range_map=lambda _: {"param": owned},
    )


@pytest.mark.parametrize("is_chained", [False, True])
def test_a_rank_without_trainable_parameters_owns_nothing(is_chained: bool) -> None:
    """A frozen tower on a pipeline stage of its own: Megatron makes optimizers of nothing."""
    config = OptimizerConfig(optimizer="adam", lr=1e-3, bf16=True)
    with alone("gloo"), ExitStack() as stack:
        cpu.install()
        stack.callback(cpu.uninstall)
        stubs: list[Any] = [Float16OptimizerWithFloat16Params(None, config, None, None)]
        chained = [ChainedOptimizer(stubs), ChainedOptimizer([])]
    for optimizer in chained if is_chained else stubs:
        assert owned_elements(optimizer) == {}
        assert not is_sharded(optimizer)


@pytest.mark.parametrize("cuts", [[], [8], [3, 9, 10, 17], [0, 0, 24]])
def test_ranges_of_a_distributed_optimizer_add_up(cuts: list[int]) -> None:
    """Empty ranges are those of ranks that own other weights."""
    weight = weight_with_gradient()
    place = Placement("fc1", 0, "column", COLS, ROWS)
    total = torch.zeros(2, dtype=torch.float64)
    ends = [*cuts, ROWS * COLS]
    for rank, (start, end) in enumerate(zip([0, *cuts], ends, strict=True)):
        topology = Topology(data=Axis(rank, len(ends)))
        found = gradient_norms({place: weight}, distributed(weight, start, end), topology, 2.0)
        total += found.get("fc1", torch.zeros(2))
    assert weight.grad is not None
    assert total.tolist() == pytest.approx([float(weight.grad.square().sum()) / 4, ROWS * COLS])


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Muon])
def test_without_shards_the_first_data_rank_counts(make: Any) -> None:
    weight = weight_with_gradient()
    place = Placement("fc1", 0, "column", COLS, ROWS)
    optimizer = make([weight])
    first = gradient_norms({place: weight}, optimizer, Topology(data=Axis(0, 2)), 1.0)
    assert weight.grad is not None
    assert math.sqrt(first["fc1"][0]) == pytest.approx(float(weight.grad.norm()))
    assert gradient_norms({place: weight}, optimizer, Topology(data=Axis(1, 2)), 1.0) == {}


def test_a_replicated_weight_counts_on_the_first_rank_of_the_tensor_axis() -> None:
    weight = weight_with_gradient()
    optimizer = torch.optim.SGD([weight])
    for rank in range(2):
        place = Placement("fc1", 0, "column", COLS, ROWS, Axis(rank, 1))
        found = gradient_norms({place: weight}, optimizer, Topology(), 1.0)
        assert bool(found) == (rank == 0)


def test_a_weight_without_gradient_has_no_norm_and_experts_add_up() -> None:
    weights = {
        Placement("fc1", 0, "column", COLS, ROWS, expert=i): weight_with_gradient()
        for i in range(3)
    }
    list(weights.values())[1].grad = None
    optimizer = torch.optim.SGD(list(weights.values()))
    found = gradient_norms(weights, optimizer, Topology(), 1.0)
    assert found["fc1"][1] == 2 * ROWS * COLS
    frozen = next(place for place, weight in weights.items() if weight.grad is None)
    assert gradient_norms({frozen: weights[frozen]}, optimizer, Topology(), 1.0) == {}

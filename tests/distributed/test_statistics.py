"""Statistics of sharded linears, and gradients under Megatron's optimizers."""

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_snip.linears.discovery import current_topology
from megatron_snip.linears.model import PlannedModel
from megatron_snip.statistics.added import Statistic
from megatron_snip.statistics.gradients import gradient_norms, is_sharded, owned_elements
from megatron_snip.statistics.sample import MeasureSettings
from megatron_snip.topology import Topology
from megatron_snip.types import Operand
from tests.distributed.launch import run_ranks
from tests.distributed.layouts import OVERLAP, SHARDED
from tests.distributed.small_model import Trainer, Warnings, layout
from tests.unit.statistics.equations import (
    FORMATS,
    SEED,
    STEP,
    Toy,
    axis_topology,
    largest_error,
    row_of,
)
from tests.unit.statistics.health_definitions import check_health

TOYS: dict[str, dict[str, Any]] = {
    "column": {"kind": "column", "axis": "tp"},
    "row": {"kind": "row", "axis": "tp"},
    "column, tokens split": {"kind": "column", "axis": "tp", "split": True},
    "data": {"kind": "row", "axis": "data"},
}
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp32": ("FP32Optimizer", {}),
    "fp32 distributed": ("DistributedOptimizer", SHARDED),
    "bf16": ("Float16OptimizerWithFloat16Params", {"bf16": True}),
    "bf16 distributed": ("DistributedOptimizer", {"bf16": True, **SHARDED}),
    "bf16 distributed, overlapped": ("DistributedOptimizer", {"bf16": True, **OVERLAP}),
}


def toys(cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Observe a linear in each layout; return its row of the reduced table, and its health."""
    results = {}
    for name, case in cases.items():
        topology = axis_topology(
            dist.get_rank(), dist.get_world_size(), dist.group.WORLD, case["axis"]
        )
        toy = Toy.make(case["kind"], microbatches=4)
        split = case.get("split", False)
        sampled = row_of(toy.observed(topology, MeasureSettings(FORMATS, STEP, SEED), split=split))
        every = MeasureSettings(FORMATS, STEP, SEED, all_tokens=True)
        row = row_of(toy.observed(topology, every, split=split))
        assert toy.health is not None
        results[name] = {"row": row, "sampled": sampled, "health": toy.health.to_dict()}
    return results


def failing() -> dict[str, Any]:
    """Observe a linear on two shards, of which the second fails to measure a plugin's statistic."""

    def ours(x: torch.Tensor, quantized: torch.Tensor) -> torch.Tensor:
        return x.sum() / (0 if dist.get_rank() == 1 else 1)

    def broken(x: torch.Tensor, quantized: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1:
            raise ArithmeticError("on this shard")
        return x.max()

    added = {
        "broken": Statistic(Operand.WEIGHT, broken, "max"),
        "good": Statistic(Operand.WEIGHT, lambda x, quantized: x.abs().sum()),
        "infinite": Statistic(Operand.WEIGHT, ours),
    }
    topology = axis_topology(dist.get_rank(), dist.get_world_size(), dist.group.WORLD, "tp")
    settings = MeasureSettings(FORMATS, STEP, SEED, all_tokens=True, added=added)
    listener = Warnings()
    logging.getLogger("megatron_snip").addHandler(listener)
    toy = Toy.make("column")
    (linear,) = toy.observed(topology, settings).linears
    found = {name: errors.added for name, errors in linear.formats.items()}
    return {"added": found, "wanted": float(toy.weight.abs().sum()), "lines": listener.texts}


def gradients(layouts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Train under each optimizer; return the norms of the last gradients, over all ranks."""
    results = {}
    for name, values in layouts.items():
        with layout({"num_layers": 1, "seq_length": 32, **values}) as trainer:
            topology, optimizer = current_topology(), trainer.state.optimizer
            weights = PlannedModel(trainer.state.model, topology, 0).weights()
            trainer.advance(3)
            own = gradient_norms(weights, optimizer, topology, 1.0)
            nothing = torch.zeros(2, dtype=torch.float64)
            found = torch.stack([own.get(place.name, nothing) for place in weights])
            dist.all_reduce(found)
            elements = [place.in_features * place.out_features for place in weights]
            results[name] = {
                "classes": _classes(trainer),
                "norms": found[:, 0].sqrt().tolist(),
                "complete": found[:, 1].tolist() == elements,
            }
    return results


def layer_wise() -> dict[str, Any]:
    """Return what a rank owns of Muon's weights as Megatron chains it from 0.18 on."""
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.randn(rows, 4, generator=generator).bfloat16() for rows in (8, 6)]
    weights = [torch.nn.Parameter(matrix) for matrix in matrices]
    norm = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    with layout({"num_layers": 1, "seq_length": 32}):
        config = OptimizerConfig(optimizer="adam", lr=0.1, bf16=True, params_dtype=torch.bfloat16)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        muon: Any = [torch.optim.Muon(weights, lr=0.1)]
        adam = torch.optim.AdamW([norm], lr=0.1)
        layer_wise = LayerWiseDistributedOptimizer(muon, config, groups)
        others = Float16OptimizerWithFloat16Params(adam, config, None, lambda *_: None)
        optimizer = ChainedOptimizer([layer_wise, others])
    owned = owned_elements(optimizer)
    own = [weight in owned for weight in weights]
    return {"own": own, "norm": norm in owned, "sharded": is_sharded(optimizer)}


def _classes(trainer: Trainer) -> list[str]:
    optimizer: Any = trainer.state.optimizer
    parts = getattr(optimizer, "chained_optimizers", [])
    return [type(optimizer).__name__, *(type(part).__name__ for part in parts)]


@pytest.fixture(scope="module")
def found_of_toys() -> list[dict[str, Any]]:
    return run_ranks(2, "tests.distributed.test_statistics:toys", {"cases": TOYS})


@pytest.mark.parametrize("name", TOYS)
def test_shards_of_two_ranks_add_up(found_of_toys: list[dict[str, Any]], name: str) -> None:
    """Against the equations in FP64 NumPy that one rank is tested against."""
    found = found_of_toys[0][name]
    assert found == found_of_toys[1][name]
    toy = Toy.make(TOYS[name]["kind"], microbatches=4)
    assert largest_error(found["row"], toy.wanted()) < 2e-5
    check_health(found["health"]["linears"][0], toy)
    # The sample is that of one rank: the same tokens, and the same rows of W.
    alone = row_of(toy.observed(Topology(), MeasureSettings(FORMATS, STEP, SEED)))
    assert largest_error(found["sampled"], alone) < 2e-5


def test_a_statistic_that_fails_on_one_rank_is_left_out_on_all() -> None:
    first, second = run_ranks(2, "tests.distributed.test_statistics:failing")
    assert first["added"] == second["added"]
    for added in first["added"].values():
        assert added == {"good": pytest.approx(first["wanted"], rel=1e-5)}
    (line,) = first["lines"]
    assert line.startswith("statistic 'broken' is left out where its plugin failed")
    assert line.endswith("ArithmeticError: on this shard (on rank 1)")
    assert second["lines"] == []


def test_every_optimizer_of_megatron_gives_the_same_gradient_norms() -> None:
    layouts = {name: layout for name, (_, layout) in OPTIMIZERS.items()}
    worker = "tests.distributed.test_statistics:gradients"
    for result in run_ranks(2, worker, {"layouts": layouts}):
        for name, (wanted, values) in OPTIMIZERS.items():
            found = result[name]
            assert wanted in found["classes"], found["classes"]
            assert found["complete"] and min(found["norms"]) > 0, name
            truth = result["bf16" if values.get("bf16") else "fp32"]["norms"]
            assert found["norms"] == pytest.approx(truth, rel=1e-2), name


def test_a_layer_wise_optimizer_within_a_chain_is_read() -> None:
    """Each data rank has the state of one of two weights, and all of the other parameters'."""
    results = run_ranks(2, "tests.distributed.test_statistics:layer_wise")
    assert sorted(result["own"] for result in results) == [[False, True], [True, False]]
    for result in results:
        assert result["norm"] and result["sharded"]

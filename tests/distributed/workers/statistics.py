"""What test_statistics.py runs on ranks: sharded toys, and Megatron's optimizers."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from megatron_snip.collectives import RemoteFailure, confirm
from megatron_snip.linears.layout import current_topology
from megatron_snip.linears.model import PlannedModel
from megatron_snip.statistics import recorder
from megatron_snip.statistics.recorder import MeasureSettings
from megatron_snip.statistics.sensitivity import Sensitivity, gather_sensitivity
from megatron_snip.streams import random_signs
from megatron_snip.topology import DataAxis, TensorAxis, Topology
from tests.distributed.workers.small_model import Trainer, layout
from tests.unit.statistics.toy import FORMATS, Toy, row_of


def all_checks(cases: dict[str, Any], layouts: dict[str, Any]) -> dict[str, Any]:
    """Everything in one process group: starting one takes longer than the checks."""
    return {
        "toys": toys(cases),
        "failing": failing(["column", "row"]),
        "signs": signs(),
        "sensitivities": sensitivities(layouts),
    }


def toys(cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Observe a toy linear in each layout; return its row of the reduced table and the loss."""
    results = {}
    for name, case in cases.items():
        toy = Toy.make(case["kind"], case.get("num_chunks", 1), num_batches=4)
        table = toy.observed(_topology(case["axis"]), case.get("sequence_parallel", False))
        results[name] = {"row": row_of(table), "loss": table.loss}
    return results


def _topology(axis: str) -> Topology:
    """All ranks along one axis."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    here = {"rank": rank, "size": size, "group": group}
    common = {"rank": rank, "world_size": size, "control": group}
    if axis == "tensor":
        return Topology(tensor=TensorAxis(**here), **common)  # type: ignore[arg-type]
    return Topology(data=DataAxis(**here), **common)  # type: ignore[arg-type]


def failing(kinds: list[str]) -> dict[str, str]:
    """Rank 1 cannot measure; pass A's collectives go on in step, then all ranks raise."""
    original = recorder.fprop_error

    def fail(*args: Any) -> Any:
        if dist.get_rank() == 1:
            raise RuntimeError("no memory here")
        return original(*args)

    recorder.fprop_error = fail  # type: ignore[assignment]
    raised = {}
    try:
        for kind in kinds:
            watching = recorder.Recorder(MeasureSettings(FORMATS, 0, 0, 8), _topology("tensor"), {})
            toy = Toy.make(kind, num_batches=2)  # type: ignore[arg-type]
            toy._show(watching, _topology("tensor"), sequence_parallel=False, probed=False)
            try:
                confirm("pass A", watching.failure, dist.group.WORLD)
            except RemoteFailure as error:
                raised[kind] = str(error)
    finally:
        recorder.fprop_error = original
    return raised


def sensitivities(layouts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Train a few steps under each optimizer; compare D with the first layout's and the formula.

    Returns:
        For each layout: the optimizers' class names, and the largest errors of D, |update|^2,
        |D|^2 and |W|^2 relative to the first layout of the same precision.
    """
    first: dict[bool, dict[str, Sensitivity]] = {}
    results = {}
    for name, values in layouts.items():
        # An even D: where v is tiny, D would amplify the order in which gradients are added.
        with layout({"num_layers": 1, "seq_length": 32, "adam_eps": 1e-4, **values}) as trainer:
            topology = current_topology()
            weights = PlannedModel(trainer.state.runner.model, topology, 0).weights()
            before = gather_sensitivity(weights, trainer.state.optimizer, topology)
            trainer.advance(3, trainer.plain())
            for chunk in trainer.state.runner.model:
                if chunk.ddp_config.overlap_param_gather:
                    chunk.start_param_sync(force_sync=True)
            found = gather_sensitivity(weights, trainer.state.optimizer, topology)
            truth = first.setdefault(trainer.config.bf16, found)
            results[name] = {
                "classes": _classes(trainer),
                "empty": all(s.update_square is None for s in before.values()),
                "errors": _largest_errors(found, truth),
                "formula": _formula_error(trainer, found, weights),
                "count": len(found),
            }
    return results


def _classes(trainer: Trainer) -> list[str]:
    optimizer: Any = trainer.state.optimizer
    parts = getattr(optimizer, "chained_optimizers", [])
    return [type(optimizer).__name__, *(type(part).__name__ for part in parts)]


def _largest_errors(
    found: dict[str, Sensitivity], truth: dict[str, Sensitivity]
) -> dict[str, float]:
    errors = dict.fromkeys(("d", "update_square", "direction_square", "weight_square"), 0.0)
    assert list(found) == list(truth)
    for name, a in found.items():
        b = truth[name]
        d = ((a.d.double() - b.d.double()).norm() / b.d.double().norm()).item()
        errors["d"] = max(errors["d"], d)
        for key in ("update_square", "direction_square", "weight_square"):
            x, y = getattr(a, key), getattr(b, key)
            errors[key] = max(errors[key], abs(x - y) / y)
    return errors


def _formula_error(trainer: Trainer, found: dict[str, Sensitivity], weights: Any) -> float | None:
    """D against its formula, from the state of an optimizer that is not sharded."""
    optimizer: Any = trainer.state.optimizer
    (part,) = getattr(optimizer, "chained_optimizers", [optimizer])
    if type(part).__name__ != "FP32Optimizer":
        return None
    config, worst, step = trainer.config, 0.0, 3
    for name, planned in weights.items():
        state = part.optimizer.state[planned.weight]
        second = state["exp_avg_sq"].double() / (1 - config.adam_beta2**step)
        slope = (1 - config.adam_beta1) / (1 - config.adam_beta1 ** (step + 1))
        d = slope / (second.sqrt() + config.adam_eps)
        worst = max(worst, ((found[name].d.double() - d).abs() / d).max().item())
    return worst


def signs() -> dict[str, float]:
    """The probe's signs of sharded weights, gathered, against those of whole ones."""
    wrong = {}
    for kind, chunks in (("column", 1), ("column", 2), ("row", 1)):
        toy = Toy.make(kind, chunks, num_batches=1)  # type: ignore[arg-type]
        topology = _topology("tensor")
        whole = random_signs(1, toy.placement(Topology()), 4)
        mine = random_signs(1, toy.placement(topology), 4)
        wanted = toy._shard(whole, toy._weight_dim, topology)
        wrong[f"{kind} {chunks}"] = (mine != wanted).double().mean().item()
    return wrong

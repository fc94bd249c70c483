"""An evaluation that attributes the loss increase of a plan to groups of linears."""

import math
from typing import Any

import pytest

from megatron_snip.options import BF16
from megatron_snip.run.controller import SnipController
from megatron_snip.run.evaluation import KINDS, THIRDS, linear_groups
from megatron_snip.trainer.loop import evaluate
from tests.distributed.launch import run_ranks
from tests.distributed.layouts import EP2, PP2, SP, TP2, Layout, OnRanks, names, results_on
from tests.distributed.small_model import NARROW, SolverHere, Trainer, layout

MODEL: Layout = {
    **NARROW,
    "num_layers": 4,
    "seq_length": 64,
    "global_batch_size": 8,
    "eval_iters": 4,
    "train_iters": 80,
    "lr": 2e-3,
}
EXPERTS: Layout = {"num_experts": 4, "global_batch_size": 4}
LAYOUTS: dict[str, Layout] = {
    "dp": {},
    "tp sp": {**TP2, **SP},
    "pp": PP2,
    "ep": {**EXPERTS, **EP2},
}
LOW: dict[str, Any] = {"policy": "uniform-fp4", "formats": "bf16,fp4", "efficiency_target": 1.0}
"""Every linear in FP4 from the start."""
NUM_TRAINED = 24


def measure(values: Layout, precision: str = "groups", **snip: Any) -> dict[str, Any]:
    """On ranks: train, evaluate, and train on; what the evaluation found."""
    with layout({**MODEL, **values}) as trainer:
        settings = {**LOW, **snip, "eval_precision": precision}
        controller = trainer.controller(settings, SolverHere())
        trainer.advance(NUM_TRAINED, controller)
        loss = evaluate(trainer.state, trainer.samples, controller)
        found = controller.evaluations.take_metrics()
        alone = _by_plans(trainer, controller, loss)
        trainer.advance(2, controller)
        controller.close()
        return {"loss": loss, "found": found, "alone": alone, **trainer.digests()}


def _by_plans(trainer: Trainer, controller: SnipController, loss: float) -> dict[str, float]:
    """What each group adds to the loss, by an evaluation under a plan with the group in BF16."""
    plan = controller.plan.linears
    precision = controller.evaluations.precision
    controller.evaluations.precision = "plan"
    increases = {}
    for group, names_of_group in linear_groups(plan).items():
        controller.model.apply({n: BF16 if n in names_of_group else o for n, o in plan.items()})
        increases[group] = loss - evaluate(trainer.state, trainer.samples, controller)
    controller.model.apply(plan)
    controller.evaluations.precision = precision
    return increases


attributed = results_on(2, "tests.distributed.test_evaluation:measure", LAYOUTS)


def of_group(found: dict[str, float], group: str) -> tuple[float, float]:
    return found[f"eval/increase_of/{group}"], found[f"eval/increase_of/{group}_error"]


@pytest.mark.parametrize("name", names(LAYOUTS, fast=["tp sp", "pp", "ep"]))
def test_the_increases_of_the_groups_add_up_to_that_of_the_plan(
    attributed: OnRanks, name: str
) -> None:
    """To within two standard errors: what two groups do together is of higher order.

    On a model that has trained for so few iterations FP4 may also lower the loss. Of experts, whose
    few tokens change with the routing, the increases may be no larger than their errors.
    """
    first, second = (rank["found"] for rank in attributed(name))
    assert first == second
    total = first["eval/loss_increase"]
    error = first["eval/loss_increase_error"]
    has_experts = "num_experts" in LAYOUTS[name]
    kinds = ["attention", "experts" if has_experts else "mlp"]
    assert [kind for kind in KINDS if f"eval/increase_of/{kind}" in first] == kinds
    for groups in (kinds, THIRDS):
        parts = [of_group(first, group) for group in groups]
        if not has_experts:
            assert any(abs(increase) > 2 * part_error > 0 for increase, part_error in parts)
        both_errors = math.hypot(error, *(part_error for _, part_error in parts))
        assert abs(sum(increase for increase, _ in parts) - total) < 2 * both_errors


@pytest.mark.parametrize("name", names(LAYOUTS, fast=["pp", "ep"]))
def test_the_increase_of_a_group_is_that_of_a_plan_with_the_group_in_bf16(
    attributed: OnRanks, name: str
) -> None:
    """To the rounding of FP32 losses: the same forwards, in another order."""
    for rank in attributed(name):
        assert len(rank["alone"]) == 5
        for group, increase in rank["alone"].items():
            assert of_group(rank["found"], group)[0] == pytest.approx(increase, abs=2e-6), group
        assert max(map(abs, rank["alone"].values())) > 1e-4


def test_an_evaluation_by_groups_changes_neither_loss_nor_training(attributed: OnRanks) -> None:
    arguments = {"values": LAYOUTS["pp"], "precision": "plan"}
    plain = run_ranks(2, "tests.distributed.test_evaluation:measure", arguments)
    for rank, wanted in zip(attributed("pp"), plain, strict=True):
        assert wanted.pop("found") == {}
        del wanted["alone"]
        assert {key: rank[key] for key in wanted} == wanted


def test_groups_that_the_plan_leaves_in_bf16_add_nothing_and_are_not_run() -> None:
    """Only the attention of the first layer is low: it is all of the increase."""
    pins = [f"decoder.layers.{i}.*=bf16" for i in range(1, 4)] + ["*.mlp.*=bf16"]
    arguments = {
        "values": {},
        "pins": pins,
        "efficiency_target": 0.0,
        "policy": "uniform-fp4",
    }
    (run,) = run_ranks(1, "tests.distributed.test_evaluation:measure", arguments)
    found = run["found"]
    total = found["eval/loss_increase"], found["eval/loss_increase_error"]
    assert of_group(found, "attention") == of_group(found, "first_third") == total
    for group in ("mlp", "middle_third", "last_third"):
        assert of_group(found, group) == (0.0, 0.0)

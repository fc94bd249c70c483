"""The same weights and data give the same statistics, divergences and plan in every layout.

What an expert computes in a training step depends on whose tokens meet in it (tiles along tokens,
random rounding), what a refresh measures does not: see megatron_snip/linears/moe_dispatch.py.
"""

from typing import Any
from unittest.mock import patch

import pytest

from megatron_snip.statistics import sample
from megatron_snip.statistics.added import STATISTICS, Statistic
from megatron_snip.types import Operand
from tests.distributed.agreement import PLACE, check_agreement
from tests.distributed.layouts import (
    EP2,
    OVERLAP,
    PP2,
    RECOMPUTE,
    SP,
    TIED,
    TP2,
    VPP,
    OnRanks,
    names,
    results_on,
)
from tests.distributed.small_model import layout, refresh_json

WORKER = "tests.distributed.test_invariance:refresh_in"
MODEL = {"num_layers": 4, "seq_length": 256, "global_batch_size": 8, "adam_eps": 1e-4}
"""Enough tokens, and D even enough, that no single element decides a sum."""
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_layers": 2, "ffn_hidden_size": 256}
EXPERTS |= {"seq_length": 512, "global_batch_size": 4, "most_microbatches": 3}
FIRST: dict[str, Any] = {"most_microbatches": 3}
ADDED = {
    f"{operand.value}_{combine}": Statistic(operand, measure, combine, grad_power)
    for operand, power in zip(Operand, (0, 0, 1), strict=True)
    for combine, measure, grad_power in (
        ("sum", lambda x, quantized: (x.abs() + quantized.abs()).sum(), power),
        ("max", lambda x, quantized: x.max(), power),
    )
}
"""Statistics as plugins add them: a sum and a maximum over each operand."""
SNIP = {"interval": 100, "start_step": 4, "lag": 1, "efficiency_target": 0.6}

REFERENCES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": TIED,
    "experts": EXPERTS,
    "first microbatches": FIRST,
}
"""Models on one rank; the others are compared with that which their name holds, or the first."""
ONE = {"full recompute": RECOMPUTE, "selective recompute": {"recompute_granularity": "selective"}}
TWO = {
    "tp": TP2,
    "tp sp": {**TP2, **SP},
    "pp": PP2,
    "vpp": VPP,
    "dp": {},
    "dp, first microbatches": FIRST,
    "dp distributed optimizer": OVERLAP,
    "tp tied": {**TP2, **TIED},
    "pp tied": {**PP2, **TIED},
    "experts dp": EXPERTS,
    "experts ep": {**EXPERTS, **EP2},
    "experts ep allgather": {**EXPERTS, **EP2, "moe_token_dispatcher_type": "allgather"},
    "experts tp ep": {**EXPERTS, **TP2, **SP, **EP2, "expert_tensor_parallel_size": 1},
}
FOUR = {
    "tp pp": {**TP2, **PP2},
    "tp sp vpp": {**TP2, **SP, **VPP},
    "vpp dp distributed optimizer": {**VPP, **OVERLAP},
    "tp sp dp distributed optimizer": {**TP2, **SP, **OVERLAP},
    "vpp dp, first microbatches": {**VPP, **FIRST},
    "dp of four, first microbatches": FIRST,
    "experts dp ep distributed optimizer": {**EXPERTS, **EP2, **OVERLAP},
    "experts tp dp ep": {**EXPERTS, **TP2, **SP, **EP2},
}
STAGES = {"pp": [{0, 1}, {2, 3}], "vpp": [{0, 2}, {1, 3}]}
"""Layers of each pipeline rank."""
FAST = ["tp sp", "pp", "dp distributed optimizer", "dp, first microbatches"]


def refresh_in(values: dict[str, Any]) -> dict[str, Any]:
    """On ranks: train 3 steps, measure at the fourth, apply; return what was found."""
    fc1 = "decoder.layers.0.mlp.experts.linear_fc1"
    STATISTICS.update(ADDED)
    settings = {**MODEL, **values}
    most = settings.pop("most_microbatches", sample.MOST_MICROBATCHES)
    with patch.object(sample, "MOST_MICROBATCHES", most), layout(settings) as trainer:
        controller = trainer.run(5, SNIP)
        assert trainer.events.measured, trainer.warnings
        mine = [x.placements[0].expert for x in controller.model.linears if x.name == fc1]
        return {
            **refresh_json(trainer, controller),
            "losses": trainer.losses,
            "experts": sorted(expert for expert in mine if expert is not None),
        }


def reference_of(name: str) -> str:
    return next((r for r in REFERENCES if r in name), "plain")


one_rank = results_on(1, WORKER, {**REFERENCES, **ONE})
two_ranks = results_on(2, WORKER, TWO)
four_ranks = results_on(4, WORKER, FOUR)


def check_ranks(results: list[dict[str, Any]], name: str, one_rank: OnRanks) -> None:
    (reference,) = one_rank(reference_of(name))
    for result in results:
        check_agreement(result, reference)
        # Not only like the reference, but the same on all ranks, bit by bit.
        for key in ("statistics", "history"):
            assert result[key] == results[0][key]


def test_the_reference_has_something_to_compare(one_rank: OnRanks) -> None:
    (plain,) = one_rank("plain")
    assert len(plain["statistics"]["linears"]) == 16
    (estimated,) = one_rank("first microbatches")
    for name, row in plain["statistics"]["linears"].items():
        estimate = estimated["statistics"]["linears"][name]
        assert (estimate["microbatches"], estimate["tokens"]) == (8, 8 * 256)
        assert estimate["input_square"] != row["input_square"]
        assert estimate["input_square"] == pytest.approx(row["input_square"], rel=0.5)
        assert [
            key for key, value in row.items() if value == 0 and key not in (*PLACE, "update_square")
        ] == []
        assert {f"fp4.{name}" for name in ADDED} <= set(row)
        assert row["microbatches"] == 8
        assert row["tokens"] == 8 * 256
    assert len(set(plain["plan"].values())) > 1
    assert plain["history"][0][0] == 5


@pytest.mark.parametrize("name", names(["experts"], []))
def test_a_row_holds_all_experts_of_a_layer(one_rank: OnRanks, name: str) -> None:
    (reference,) = one_rank(name)
    rows = reference["statistics"]["linears"]
    plan = reference["plan"]
    assert list(rows)[2:4] == [f"decoder.layers.0.mlp.experts.linear_fc{i}" for i in (1, 2)]
    tokens = 4 * 512  # microbatches of one sample
    for linear, row in rows.items():
        # Two of four experts see each token, and each expert is shown every microbatch.
        assert row["tokens"] == tokens * (2 if "experts" in linear else 1)
        assert row["microbatches"] == (4 * 4 if "experts" in linear else 4)
    assert set(plan) == set(rows) and set(plan.values()) == {"fp4", "fp8"}
    assert reference["losses"][0] > reference["losses"][2]


@pytest.mark.parametrize("name", names(ONE, []))
def test_recomputing_activations_changes_nothing(one_rank: OnRanks, name: str) -> None:
    check_agreement(one_rank(name)[0], one_rank("plain")[0])


@pytest.mark.parametrize("name", names(TWO, FAST))
def test_two_ranks_measure_and_plan_as_one(
    one_rank: OnRanks, two_ranks: OnRanks, name: str
) -> None:
    check_ranks(two_ranks(name), name, one_rank)
    if "experts" in name:
        own = [result["experts"] for result in two_ranks(name)]
        assert own == ([[0, 1, 2, 3]] * 2 if name == "experts dp" else [[0, 1], [2, 3]])


@pytest.mark.parametrize("name", names(FOUR, []))
def test_four_ranks_measure_and_plan_as_one(
    one_rank: OnRanks, four_ranks: OnRanks, name: str
) -> None:
    check_ranks(four_ranks(name), name, one_rank)


@pytest.mark.parametrize("name", names(STAGES, FAST))
def test_stages_are_the_pipelines(two_ranks: OnRanks, name: str) -> None:
    stages = two_ranks(name)[0]["stages"]
    layers = [
        {int(linear.split(".")[2]) for linear, s in stages.items() if s == stage}
        for stage in range(2)
    ]
    assert layers == STAGES[name]

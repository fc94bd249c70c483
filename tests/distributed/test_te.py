"""Transformer Engine's linears on ranks: tensor and sequence parallel, and experts dealt out.

On Transformer Engine's own Python (tests/te_on_cpu). A refresh must find what it finds of
Megatron's own linears with the same weights and data.
"""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from tests.distributed.agreement import check_agreement
from tests.distributed.launch import Server, run_ranks
from tests.distributed.layouts import SP, TP2

pytestmark = pytest.mark.slow

WORDS = {"fp8": "mxfp8", "fp4": "nvfp4", "bf16": "bf16"}
"""What runs on a Blackwell GPU."""


LAYOUT = {"values": {**TP2, **SP}}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """It finds Transformer Engine before it imports Megatron."""
    with closing(Server(preload=["tests.distributed.te_models"])) as running:
        yield running


def on_ranks(server: Server, name: str, **arguments: Any) -> list[dict[str, Any]]:
    return run_ranks(2, f"tests.distributed.te_models:{name}", arguments, server)


@pytest.fixture(scope="module")
def native(server: Server) -> list[dict[str, Any]]:
    """A refresh in Transformer Engine's recipes, of either kind of linear."""
    return on_ranks(server, "native", **LAYOUT)


def test_statistics_are_those_of_megatrons_own_linears(native: list[dict[str, Any]]) -> None:
    for result in native:
        check_agreement(result["te"], result["local"])
    assert native[0]["te"]["statistics"] == native[1]["te"]["statistics"]


def test_the_plan_that_is_applied_runs(native: list[dict[str, Any]]) -> None:
    for result in native:
        te = result["te"]
        assert [step for step, _ in te["history"]] == [4]
        assert set(te["plan"].values()) == {"fp8", "fp4"}
        assert set(te["ran"]) == set(te["plan"])
        for name, seen in te["ran"].items():
            assert seen == [[WORDS[te["plan"][name]]] * 3], name


def test_simulated_on_transformer_engines_linears_is_simulated_on_megatrons_own(
    server: Server,
) -> None:
    for result in on_ranks(server, "simulated", **LAYOUT):
        te = result["te"]
        local = result["local"]
        check_agreement(te, local)
        assert te["losses"] == pytest.approx(local["losses"], rel=1e-5)
        assert set(te["plan"].values()) == {"fp8", "fp4"}
        assert {row["recipe"] for row in te["precision"]["linears"]} == {"simulated"}


def test_refreshes_leave_no_trace_in_training(server: Server) -> None:
    """With the plan frozen, a run with refreshes is bitwise the run without."""
    for result in on_ranks(server, "frozen", **LAYOUT):
        measured, plain = result["with"], result["without"]
        assert measured.pop("refreshes") == 2 and plain.pop("refreshes") == 0
        assert measured["options"] == ["fp4", "fp8"] and len(measured["ran"]) > 1
        assert measured == plain


def test_a_weight_that_every_tensor_rank_holds_in_full_counts_once(server: Server) -> None:
    """Latent attention's down projections: statistics, plan and losses of the layout without."""
    ranks = on_ranks(server, "latent", **LAYOUT)
    for result in ranks:
        on_two = result["split"]
        on_one = result["unsplit"]
        check_agreement(on_two, on_one)
        down = [name for name in on_two["plan"] if name.endswith("_down_proj")]
        assert len(down) == 2
        in_order = ["q_down_proj", "kv_down_proj", "q_up_proj", "kv_up_proj", "proj", "fc1", "fc2"]
        assert [name.rsplit("linear_", 1)[1] for name in on_two["plan"]] == in_order
        for name in down:
            assert on_two["ran"][name] == [[WORDS[on_two["plan"][name]]] * 3]
            rows = [one["statistics"]["linears"][name] for one in (on_two, on_one)]
            assert rows[0]["flops_per_token"] == rows[1]["flops_per_token"]
    tables = [result["split"]["statistics"] for result in ranks]
    assert tables[0] == tables[1]


def test_experts_of_both_ranks_are_rows_of_one_table(server: Server) -> None:
    """That what is observed agrees with Megatron's own experts was asserted on the ranks."""
    ranks = on_ranks(server, "experts")
    tokens = ranks[0]["tokens"] | ranks[1]["tokens"]
    assert len(tokens) == 2 * 4  # layers and experts: no rank has another's
    for microbatch in range(2):
        for layer in range(2):
            own = [n for n in tokens if n.startswith(f"decoder.layers.{layer}.")]
            # A microbatch of 32 tokens of each of two ranks, two experts each.
            assert sum(tokens[name][microbatch] for name in own) == 2 * 32 * 2
    assert ranks[0]["rows"] == ranks[1]["rows"]
    assert len(ranks[0]["rows"]) == 8

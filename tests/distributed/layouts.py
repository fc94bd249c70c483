"""Parallel layouts, and runs of ranks in each."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from tests.distributed.launch import run_ranks

Layout = dict[str, Any]
OnRanks = Callable[[str], list[Any]]
"""Gives what each rank returned, by the name of a layout."""

TP2: Layout = {"tensor_model_parallel_size": 2}
PP2: Layout = {"pipeline_model_parallel_size": 2}
EP2: Layout = {"expert_model_parallel_size": 2}
VPP: Layout = {**PP2, "num_layers_per_virtual_pipeline_stage": 1}
SP: Layout = {"sequence_parallel": True}
SHARDED: Layout = {"use_distributed_optimizer": True}
OVERLAP: Layout = {**SHARDED, "overlap_grad_reduce": True, "overlap_param_gather": True}
TIED: Layout = {"untie_embeddings_and_output_weights": False}
RECOMPUTE: Layout = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def names(layouts: Iterable[str], fast: Iterable[str]) -> list[Any]:
    """Return values for `pytest.mark.parametrize`; all but `fast` are marked slow."""
    chosen = set(fast)
    return [n if n in chosen else pytest.param(n, marks=pytest.mark.slow) for n in layouts]


def results_on(
    ranks: int, worker: str, layouts: Mapping[str, Layout], folder: bool = False
) -> Callable[..., OnRanks]:
    """Return a fixture: what `worker(values)` returns on each rank, by the name of a layout.

    A layout runs once, when the first test asks for it. If `folder`, the worker gets one that is
    empty.
    """

    @pytest.fixture(scope="module")
    def results(tmp_path_factory: pytest.TempPathFactory) -> OnRanks:
        @functools.cache
        def on_ranks(name: str) -> list[Any]:
            arguments: dict[str, Any] = {"values": layouts[name]}
            if folder:
                arguments["folder"] = str(tmp_path_factory.mktemp("ranks"))
            return run_ranks(ranks, worker, arguments)

        return on_ranks

    return results

"""Layouts, and their choice: one launch of ranks runs those of the selected tests, and no other."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import pytest

from tests.distributed.launch import run_ranks

T = TypeVar("T")
Layout = dict[str, Any]

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


def selected(request: pytest.FixtureRequest, layouts: Mapping[str, T]) -> dict[str, T]:
    """Return the layouts that the selected tests of a fixture's module have as a parameter."""
    wanted = {
        value
        for item in request.session.items
        if item.path == request.path and isinstance(item, pytest.Function)
        for value in getattr(getattr(item, "callspec", None), "params", {}).values()
    }
    return {name: value for name, value in layouts.items() if name in wanted}


def results_on(
    ranks: int, worker: str, layouts: Mapping[str, Layout], folder: bool = False
) -> Callable[..., Any]:
    """Return a fixture: what `worker` returns on each rank, by name of the selected layouts.

    If `folder`, the worker gets one that is empty.
    """

    @pytest.fixture(scope="module")
    def results(
        request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
    ) -> list[dict[str, Any]]:
        arguments: dict[str, Any] = {"layouts": selected(request, layouts)}
        if folder:
            arguments["folder"] = str(tmp_path_factory.mktemp("ranks"))
        return run_ranks(ranks, worker, arguments)

    return results

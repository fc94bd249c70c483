"""The weights of `norms-kinds` are those of the committed runs, and a fit finds known costs."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.compare import forks, kinds
from benchmarks.compare.store import ResultStore
from benchmarks.machine import RESULTS
from megatron_snip.planning.policies import KIND_WEIGHTS
from megatron_snip.types import Gemm


def test_the_weights_of_the_policy_are_those_of_the_committed_runs() -> None:
    path = RESULTS / "compare.jsonl"
    rows = ResultStore(path).select({"kind": "forks", "setup": "small", "low": kinds.FITTED})
    fitted = forks.fit(rows, path)
    assert fitted is not None
    found = kinds.fit_kinds(fitted).weights
    assert found == {gemm: pytest.approx(w, abs=5e-4) for gemm, w in KIND_WEIGHTS.items()}


def test_known_costs_by_kind_are_found(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    items = [(f"decoder.layers.{k}.mlp.linear_fc1", gemm) for k in range(4) for gemm in Gemm]
    bounds = rng.lognormal(0, 1, len(items))
    scores = {"items": [f"{name}:{gemm}" for name, gemm in items], "flops": [1.0] * len(items)}
    path = tmp_path / "runs.jsonl"
    text = json.dumps({**scores, "scores": {"norms": list(bounds), "snip": [1.0] * len(items)}})
    (tmp_path / "runs-scores-s-plain-fp3.json").write_text(text)
    cost = {Gemm.FPROP: 2.0, Gemm.DGRAD: 0.5, Gemm.WGRAD: 0.25}
    place = {"kind": "forks", "setup": "s", "scenario": "plain", "low": "fp3", "seed": 0}
    rows = [{**place, "data_seed": 0, "variant": "bf16", "loss": 2.0}]
    for pair in range(len(items)):
        for half, low in enumerate(forks._halves(items, pair)):
            gap = sum(cost[item[1]] * bounds[items.index(item)] for item in low)
            row = {**place, "data_seed": 0, "variant": f"{pair}-{half}", "loss": 2 + gap / 1e3}
            rows.append(row)
    fitted = forks.fit(rows, path)
    assert fitted is not None
    found = kinds.fit_kinds(fitted)
    assert found.cost == {gemm: pytest.approx(value) for gemm, value in cost.items()}
    assert found.weights[Gemm.WGRAD] == pytest.approx(0.125)
    assert kinds.kinds_table({"fp3": fitted}).count("| 1.00 |") == 1  # the fit itself

"""The linear's benchmark, on the CPU."""

import json

import torch

from benchmarks import linear


def test_every_case_is_measured() -> None:
    result = linear.measure((256, 128, 384), torch.device("cpu"), rounds=1)
    cases = {"bf16", "fp8 simulate", "fp8 simulate, W cached", "fp4 simulate"}
    assert set(result["seconds"]) == set(result["speedup_over_bf16"]) == cases
    assert result["speedup_over_bf16"]["bf16"] == 1.0 and result["failures"] == {}
    assert set(result["saved_bytes"].values()) == {2 * 256 * 128}
    assert json.loads(json.dumps(result)) == result
    results = [
        {"shape": [size] * 3, "speedup_over_bf16": {"fp8 simulate": 0.8}} for size in (64, 8192)
    ]
    (goal,) = linear.goals(results)
    assert (goal["value"], goal["met"]) == (1.25, False)

"""The linear's benchmark on the CPU, with the emulation in the native GEMMs' place."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import linear, step
from benchmarks.timing import seconds_by_turns
from megatron_snip.options import Option


def test_every_way_is_measured(tmp_path: Path) -> None:
    result = linear.measure((256, 128, 384), torch.device("cpu"), with_native=True, rounds=1)
    native = {"fp8 native", "fp4 native", "fp8 native, W kept"}
    ways = {"bf16", "fp8 simulate", "fp4 simulate", *native}
    assert set(result["seconds"]) == set(result["speedup_over_bf16"]) == ways
    assert result["speedup_over_bf16"]["bf16"] == 1.0 and result["failures"] == {}
    x_bytes, scales = 256 * 128, 4 * 128 * 256 // 128
    assert {result["saved_bytes"][name] for name in ways - native} == {2 * x_bytes}
    assert {result["saved_bytes"][name] for name in native} == {x_bytes + scales}
    assert all(seconds > 0 for seconds in result["parts_seconds"].values())
    assert json.loads(json.dumps(result)) == result


def fake(shape: tuple[int, int, int], fp8: float) -> dict[str, Any]:
    return {
        "shape": list(shape),
        "speedup_over_bf16": {"fp8 native": fp8, "fp8 simulate": 0.8},
        "fp4_over_fp8_native": 1.2,
        "quantize_share_of_fp8": 0.1,
    }


def test_goals_are_those_of_the_shape() -> None:
    found = linear.goals([fake((8192, 8192, 8192), 1.29), fake((64, 64, 64), 9.0)])
    assert [(goal["value"], goal["met"]) for goal in found] == [
        (1.29, False),
        (1.2, False),
        (1.25, False),
        (0.1, True),
    ]
    assert [g["met"] for g in linear.goals([fake((4096, 4096, 4096), 1.2)])] == [True, False]


def test_ways_take_turns_and_are_run_once_before() -> None:
    seen: list[str] = []
    times = seconds_by_turns(
        {"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}, rounds=2, gpu=False
    )
    assert seen == ["a", "b"] * 3
    assert set(times.seconds) == {"a", "b"} and times.failed == {}


def test_results_are_kept_after_every_shape_and_failures_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, seen = tmp_path / "linear.json", []

    def measure(shape: Any, *_: Any) -> dict[str, Any]:
        seen.append(json.loads(file.read_text())["results"] if seen else [])
        failures = {"fp8 native": "RuntimeError: no"} if len(seen) == 2 else {}
        return {
            "shape": list(shape),
            "seconds": {},
            "host_seconds": {},
            "saved_bytes": {},
            "failures": failures,
        }

    monkeypatch.setattr(linear, "measure", measure)
    monkeypatch.setattr(linear, "has_gpu", lambda: False)
    monkeypatch.setattr(linear.cpu, "install", lambda: True)
    assert linear.main(["--json", str(file)]) == 1
    assert [len(results) for results in seen] == [0, 1, 2]
    assert len(json.loads(file.read_text())["results"]) == 3


@pytest.mark.parametrize("flops", [[1.0] * 16, [3, 1, 4, 4] * 6, [1.0, 100.0, 1.0]])
def test_three_quarters_of_the_flops_are_fp4(flops: list[float]) -> None:
    infos = [SimpleNamespace(name=str(i), flops_per_token=f) for i, f in enumerate(flops)]
    lab: Any = SimpleNamespace(model=SimpleNamespace(all_linears=infos))
    plan = step.three_quarters(lab)
    low = sum(i.flops_per_token for i in infos if plan[i.name] == Option.uniform("fp4"))
    assert low >= 0.75 * sum(flops)
    assert low - max(flops) < 0.75 * sum(flops)

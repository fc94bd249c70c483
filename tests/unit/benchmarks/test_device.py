"""What is looked at first on a GPU, over the CPU's emulation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import device
from megatron_snip.linears import native_gemm
from megatron_snip.quantizers import routes
from megatron_snip.types import Gemm

CPU = torch.device("cpu")


def test_the_cpu_agrees_with_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "device.json"
    monkeypatch.setattr(device, "DEPTHS", (1, 3, 64))
    monkeypatch.setattr(device, "ceilings", lambda _: {"bf16_tflops": 1.0})
    real = device.run
    monkeypatch.setattr(device, "run", lambda where, depths: real(where, depths[:2]))
    monkeypatch.setattr(device, "has_gpu", lambda: False)
    monkeypatch.setattr(device, "show", lambda *_: None)
    assert device.main(["--json", str(file)]) == 0
    report = json.loads(file.read_text())
    names = [check["name"] for check in report["checks"]]
    assert names[:3] == ["fprop, 1 blocks", "fprop, 3 blocks", "fprop, 200x176x328"]
    assert names[-2:] == ["error norms and moments", "a linear waits for the GPU"]
    assert report["failures"] == {} and report["dims_padded_to"] == native_gemm.ALIGNMENT


@pytest.mark.parametrize("gemm", list(Gemm))
def test_each_pair_is_as_deep_as_asked(gemm: Gemm) -> None:
    shape = device.pair_shape(gemm, 640)
    a, b = device.sample_operands("fp8", CPU, shape)[gemm]
    assert a.depth == b.depth == 640


def test_differences_and_failures_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: torch.device) -> float:
        raise RuntimeError("an illegal\nmemory access")

    checks = {"right": (lambda _: 0.5, 1.0), "wrong": (lambda _: 2.0, 1.0), "dead": (broken, 1.0)}
    checks["nan"] = (lambda _: float("nan"), 1.0)
    monkeypatch.setattr(device, "checks", lambda *_: checks)
    monkeypatch.setattr(device, "ceilings", broken)
    report = device.run(CPU)
    assert [(check["name"], check["met"]) for check in report["checks"]] == [
        ("right", True),
        ("wrong", False),
        ("nan", False),
    ]
    assert report["failures"]["dead"] == "RuntimeError: an illegal memory access"
    assert set(report["failures"]) == {"ceilings", "dead"}


def test_one_wrong_byte_of_the_transposed_output_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    check = device._bits(130, 200)
    assert check(CPU) is False
    calls = []

    def one_wrong(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        row, tokens = routes.quantize_payload_both(*arguments, **named)
        if len(calls) == 2:  # on the device: fp8, then fp4
            tokens.codes[129, 199] ^= 1
        return row, tokens

    monkeypatch.setattr(device, "quantize_payload_both", one_wrong)
    assert check(CPU) is True

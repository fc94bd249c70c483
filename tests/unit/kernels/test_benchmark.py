"""The kernels' benchmark runs anywhere and writes what it measured."""

import json

import pytest
import torch

from benchmarks import kernel_cases, kernels


def test_without_a_gpu_it_says_so(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert kernels.main([]) == 0
    assert "No CUDA device" in capsys.readouterr().out


def test_a_failing_case_is_named_and_the_others_are_measured(monkeypatch, tmp_path):
    def refuse(x):
        raise RuntimeError("no\nkernel")

    cases = [c for c in kernels.cases() if c.name != "fp4 1x128"]
    broken = kernel_cases.Case("fp4 1x128", refuse, 4, 0.85)
    for module in (kernels, kernel_cases):
        monkeypatch.setattr(module, "cases", lambda: [*cases, broken])
    file = tmp_path / "new" / "kernels.json"
    size = ["--rows", "128", "--cols", "256", "--repeats", "1"]
    assert kernels.main(["--cpu", *size, "--json", str(file)]) == 1
    report = json.loads(file.read_text())
    assert report["failures"] == {"fp4 1x128": "RuntimeError: no kernel"}
    assert [result["name"] for result in report["results"]] == [case.name for case in cases]
    assert all(result["milliseconds"] > 0 for result in report["results"])
    assert len(report["ratios"]) == 1
    assert kernels.check_bits(torch.device("cpu")) == ["fp4 1x128"]

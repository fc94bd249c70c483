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


def test_a_small_run_on_the_cpu(tmp_path):
    file = tmp_path / "new" / "kernels.json"
    size = ["--rows", "128", "--cols", "256", "--repeats", "1"]
    assert kernels.main(["--cpu", *size, "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert report["copy_gigabytes_per_s"] > 0 and report["bits_differ"] == []
    names = [case.name for case in kernels.cases()]
    assert [result["name"] for result in report["results"]] == names
    assert all(result["milliseconds"] > 0 for result in report["results"])
    assert len(report["ratios"]) == 3


def test_different_bits_are_found():
    x = torch.randn(4, 4)
    assert kernel_cases.same(x, x) and not kernel_cases.same((x, x), (x, x + 1))
    assert kernels.check_bits(torch.device("cpu")) == []


@pytest.mark.parametrize(("value", "met"), [(1.0, False), (1.3, True), (2.0, True)])
def test_goals(value, met):
    assert kernels.Ratio("", value, least=1.3).met is met
    assert kernels.Ratio("", value, most=1.3).met is (value <= 1.3)


def test_a_case_that_fails_is_named_and_the_rest_is_measured(monkeypatch, tmp_path):
    def refuse(x):
        raise RuntimeError("no\nkernel")

    cases = [c for c in kernels.cases() if c.name != "fp4 1x128 to bf16"]
    broken = kernel_cases.Case("fp4 1x128 to bf16", refuse, 4, 0.85)
    for room in (kernels, kernel_cases):
        monkeypatch.setattr(room, "cases", lambda: [*cases, broken])
    file = tmp_path / "kernels.json"
    size = ["--rows", "128", "--cols", "256", "--repeats", "1"]
    assert kernels.main(["--cpu", *size, "--json", str(file)]) == 1
    report = json.loads(file.read_text())
    assert report["failures"] == {"fp4 1x128 to bf16": "RuntimeError: no kernel"}
    assert len(report["results"]) == len(cases) and len(report["ratios"]) == 2
    assert kernels.check_bits(torch.device("cpu")) == ["fp4 1x128 to bf16"]


def test_a_gpu_is_timed_by_its_events(monkeypatch):
    stamps = iter(range(100))

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = next(stamps)

        def elapsed_time(self, other):
            return 2.0 * (other.at - self.at)

    held = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", held.append, raising=False)
    seen = []
    inputs = [torch.zeros(1), torch.ones(1)]
    assert kernels.time_on_gpu(lambda x: seen.append(float(x)), inputs, 12) == 2e-3
    assert seen == [0, 1, 0, *[0, 1] * 6] and len(held) == 2


def test_goals_are_bandwidths_and_ratios():
    results = [
        kernels.Result("fp8 1x128 payload", 1.0, 9.0, 0.9, 0.85),
        kernels.Result("fp8 128x1 payload, transposed", 1.0, 9.0, 0.7, 0.8),
        kernels.Result("fp8 both payloads", 1.0, 9.0, 0.9, None),
    ]
    found = {goal["name"]: (goal["value"], goal["met"]) for goal in kernels.goals(results)}
    assert found == {
        "fp8 1x128 payload, of the copy's bandwidth": (0.9, True),
        "fp8 128x1 payload, transposed, of the copy's bandwidth": (0.7, False),
        "two kernels / both directions at once": (2.0, True),
    }
